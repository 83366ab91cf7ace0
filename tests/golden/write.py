"""Write the missing golden checkpoints, and update the list of public names."""

import recipes
import surface

for name in recipes.RECIPES:
    if not (recipes.FOLDER / name).exists():
        recipes.write(name)
surface.FILE.write_text("\n".join(surface.surface()) + "\n")
