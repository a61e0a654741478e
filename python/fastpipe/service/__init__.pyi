# The names of the package: type checkers read them here, and `_lazy.py` when it is imported.

from fastpipe.service._connect import connect as connect
from fastpipe.service._local import LocalService as LocalService
from fastpipe.service._server import Server as Server
from fastpipe.service._settings import Directory as Directory
