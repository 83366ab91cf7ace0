"""Write the missing golden checkpoints, and update the snapshot of the public interface."""

import recipes
import surface

for name in recipes.RECIPES:
    if not (recipes.FOLDER / name).exists():
        recipes.write(name)
surface.FILE.write_text("\n".join(surface.surface()) + "\n")
