"""Private copies of a file tree in which hostile commands run. `make_backend()` chooses what this machine has."""

from envs.sandbox.base import WORKSPACE as WORKSPACE
from envs.sandbox.base import Backend as Backend
from envs.sandbox.base import Command as Command
from envs.sandbox.base import Limits as Limits
from envs.sandbox.base import Result as Result
from envs.sandbox.base import Sandbox as Sandbox
from envs.sandbox.base import SandboxError as SandboxError
from envs.sandbox.base import Template as Template
from envs.sandbox.base import read_file as read_file
from envs.sandbox.base import write_file as write_file
from envs.sandbox.detect import BackendName as BackendName
from envs.sandbox.detect import make_backend as make_backend
from envs.sandbox.detect import missing_for_bubblewrap as missing_for_bubblewrap
