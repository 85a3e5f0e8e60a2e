from ..cli.conftest import policy

__all__ = ["policy"]
