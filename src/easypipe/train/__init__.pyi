"""What `import easypipe.train` exports, for type checkers and editors; __init__.py loads it when it is first used."""

from easypipe.train.model.pretrained.load import load_pretrained
from easypipe.train.model.pretrained.save import save_pretrained
from easypipe.train.parallel.distributed import initialize

__all__ = ["initialize", "load_pretrained", "save_pretrained"]
