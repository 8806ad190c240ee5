"""What `import easypipe.train` exports and from where; `__init__.py` loads each
name when it is first used.
"""

from easypipe.train.model.pretrained.gguf import save_gguf
from easypipe.train.model.pretrained.origin import load_pretrained
from easypipe.train.model.pretrained.save import save_pretrained
from easypipe.train.parallel.distributed import initialize

__all__ = ["initialize", "load_pretrained", "save_gguf", "save_pretrained"]
