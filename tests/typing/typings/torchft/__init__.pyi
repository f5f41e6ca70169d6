# The manager's class alone: torchft is not there where types are checked.
