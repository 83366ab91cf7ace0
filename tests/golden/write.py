"""Write the golden checkpoints of recipes that have none yet."""

import recipes

for name in recipes.RECIPES:
    if not (recipes.FOLDER / name).exists():
        recipes.write(name)
