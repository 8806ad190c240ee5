"""What `import easypipe.train` exports, for type checkers and editors; __init__.py loads it when it is first used."""

from easypipe.train.distributed import initialize
from easypipe.train.models.load import load_pretrained
from easypipe.train.models.save import save_pretrained

__all__ = ["initialize", "load_pretrained", "save_pretrained"]
