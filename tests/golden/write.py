"""Write the golden checkpoints of recipes that have none yet, and the list of public names anew."""

import recipes
import surface

for name in recipes.RECIPES:
    if not (recipes.FOLDER / name).exists():
        recipes.write(name)
surface.FILE.write_text("\n".join(surface.surface()) + "\n")
