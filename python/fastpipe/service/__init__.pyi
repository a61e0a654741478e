# The public names of the package. Type checkers read this file, and so does `_lazy.py` at import.

from fastpipe.service._connect import connect as connect
from fastpipe.service._local import LocalService as LocalService
from fastpipe.service._server import Server as Server
from fastpipe.service._settings import Directory as Directory
