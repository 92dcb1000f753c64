"""What can be wrong with a model that a user names; every message says what to do about it."""


class ModelError(ValueError):
    """A model that cannot be loaded, by the user's choice of model or the state of its files."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something that this engine does not compute."""


class ModelNotFound(ModelError):
    """No such directory, file, alias or hub repository, or the hub cannot be reached."""


class WeightsError(ModelError):
    """A missing shard, or a missing, unexpected or wrongly shaped tensor, or a pickled checkpoint."""


class TokenizerError(ModelError):
    """The files of the tokenizer cannot be read."""


class NotEnoughMemory(ModelError):
    """The weights need more memory than the device has available."""


class FetchError(ModelError):
    """A model could not be fetched from the package index, or what came is not what was pinned."""
