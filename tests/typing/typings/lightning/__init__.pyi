# The base class alone: lightning is not there where types are checked.
