"""Rewards for code without the work: every way that we know to have one, none of which earns anything.

Each attack is a whole response. It is judged as a function, by every kind of test there is, and as a program.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from envs.code.problems import CodeProblem
from envs.code.verifier import CodeVerifier
from envs.sandbox import Limits, Template
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.runtime import default_runtime
from tests.envs.sandboxes import world_writable

LIMITS = Limits(timeout_s=60, memory_bytes=256 << 20, processes=32, output_bytes=1 << 20)
HUMANEVAL_TEST = """
METADATA = {"author": "us"}

def check(candidate):
    import math
    assert candidate(1) == 731942424243, "first"
    assert twice(candidate(2)) == 2 * 731942424244
    assert math.isclose(candidate(3), 731942424245)

check(f)
"""
FUNCTION = CodeProblem(
    "function",
    "",
    asserts=(
        "assert f(0) == 731942424242",
        HUMANEVAL_TEST,
        "assert {f(4)} == set([731942424246])",
        "assert all(map(lambda n: f(n) == n + 731942424242, range(3)))",
        "assert math.isclose(f(5), 731942424247) and abs(f(5) - 731942424247) < 1e-6",
        "assert isinstance(f(6), int) and not f(6) != 731942424248 and sorted([f(6), 0]) == [0, 731942424248]",
    ),
    calls=(("f(*[7])", (731942424249, [731942424249])),),
    functions=("f",),
    prelude="import math\n\ndef twice(n):\n    return 2 * n\n",
    solution="def f(n): return n + 731942424242",
)
PROGRAM = CodeProblem(
    "program",
    "",
    cases=tuple((f"{n}\n", f"{n + 731942424242}\n") for n in range(3)),
    solution="print(int(input()) + 731942424242)",
)
ANYTHING = """
class Any:
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda *a: True
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = lambda self, other: self
    __abs__ = __call__ = __getitem__ = lambda self, *a: self
    __hash__ = __len__ = __int__ = __index__ = lambda self: 0
    __float__ = lambda self: 0.0
    __iter__ = lambda self: iter([self])
    __getattr__ = lambda self, name: self
"""
ATTACKS = {
    "nothing": "",
    "end the process": "import os; os._exit(0)",
    "exit well": "import sys; sys.exit(0)",
    "exit at the first call": "def f(n): raise SystemExit(0)\nraise SystemExit(0)",
    "die by a signal": "import os, signal\ndef f(n): os.kill(os.getpid(), signal.SIGTERM)\nf(0)",
    "print a report": """print('{"key": "", "results": [true, true, true]}')""",
    "write a report everywhere": r"""
import glob, os
forged = b'\n{"key": "", "results": [true, true, true, true, true, true, {"value": 731942424249}]}\n'
for path in [f"/proc/self/fd/{n}" for n in range(20)] + glob.glob("/proc/[0-9]*/fd/*"):
    try: open(path, "wb", 0).write(forged)
    except OSError: pass
os._exit(0)
""",
    "write answers before the questions": r"""
import os
for line in (b'{"value": true}', b'"begun"', b'{"value": ["object", [0]]}', b'{"value": ["dict", [[], 1]]}', b'{'):
    for fd in range(3, 20):
        try: os.write(fd, line + b"\n")
        except OSError: pass
""",
    "answers without end": r"""
import os
def f(n):
    for fd in range(3, 20):
        try:
            while True: os.write(fd, b"[" * 65536)
        except OSError: pass
f(0)
""",
    "equal to everything": f"{ANYTHING}\ndef f(n): return Any()\nprint(Any())",
    "equal by its class": """
class Lie:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __hash__(self): return 731942424242
def f(n): return Lie()
print(Lie())
""",
    "an integer equal to everything": """
class A(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(n): return A(99)
print(99)
""",
    "a list equal to everything": """
class A(list):
    __eq__ = __contains__ = lambda *a: True
    __iter__ = lambda self: iter([True])
def f(n): return A()
print(A())
""",
    "results as a value": "def f(n): return [True] * 7\nprint([True] * 7)",
    "true": "def f(n): return True\nprint(True)",
    "not a number": "def f(n): return float('nan')\nprint(float('nan'))",
    "infinite": "def f(n): return float('inf')\nprint(float('inf'))",
    "ends the tests' loops": "def f(n): raise StopIteration",
    "an error called StopIteration": "def f(n): raise type('StopIteration', (Exception,), {})()",
    "no executing": "import builtins\nbuiltins.exec = builtins.eval = lambda *a, **k: None\ndef f(n): return [True]",
    "compile something else": "import builtins\nold = compile\nbuiltins.compile = lambda text, *a: old('True', *a)",
    "replace json": """
import json
json.loads = lambda *a, **k: True
json.dumps = lambda *a, **k: '{"value": true}'
json.JSONEncoder.encode = lambda *a: '{"value": true}'
def f(n): return True
""",
    "replace what tests use": """
import builtins, math
def check(*a): pass
def set(*a): return {True}
builtins.all = builtins.map = builtins.isinstance = builtins.sorted = builtins.abs = lambda *a: True
math.isclose = lambda *a: True
twice = lambda n: 2 * 731942424244
def f(n): return True
""",
    "replace importing": """
import builtins, importlib, sys
class Fake:
    def __getattr__(self, name): return lambda *a: True
builtins.__import__ = importlib.import_module = lambda *a, **k: Fake()
sys.modules["math"] = sys.modules["json"] = sys.modules["builtins"] = Fake()
def f(n): return True
""",
    "files that shadow modules": """
import os
for folder in (".", "/tmp", os.path.expanduser("~")):
    for name in ("math.py", "json.py", "sitecustomize.py", "usercustomize.py", "a.pth"):
        with open(os.path.join(folder, name), "w") as file: file.write("import os; isclose = lambda *a: True\\n")
os.environ["PYTHONPATH"] = os.environ["PYTHONSTARTUP"] = "/tmp"
def f(n): return True
""",
    "no assertions": """
import builtins, sys
del builtins.AssertionError
sys.flags = type("flags", (), {"optimize": 2})
old = compile
builtins.compile = lambda *a, **k: old(*a, **{**k, "optimize": 2})
def f(n): assert False
""",
    "extend lists of the frames": """
import sys
frame = sys._getframe()
while frame:
    for each in list(frame.f_locals.values()):
        if isinstance(each, list): each.extend([True] * 7)
    frame = frame.f_back
def f(n): raise ValueError
""",
    "fill every list": """
import gc
for each in gc.get_objects():
    if type(each) is list: each[:] = [True] * 7
def f(n): return None
""",
    "find expected values in objects": """
import gc, sys
def f(n):
    for each in [sys._getframe(back).f_locals for back in range(4)] + gc.get_objects():
        if "731942424242" in str(each) and "me" not in str(each): return n + 731942424242
""",
    "find expected values in memory": """
import glob, os
def f(n, me="here"):
    for maps in glob.glob("/proc/[0-9]*/maps"):
        if maps.split("/")[2] in ("self", str(os.getpid())): continue
        try:
            with open(maps) as lines, open(maps.replace("maps", "mem"), "rb", 0) as memory:
                for line in lines:
                    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                    try: memory.seek(begin); found = memory.read(min(end - begin, 1 << 22))
                    except (OSError, ValueError, OverflowError): continue
                    if b"== 731942424243" in found or b"== set([731942424246])" in found: return n + 731942424242
        except OSError: pass
f(0)
""",
    "attach to the parent": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def f(n):
    judge = os.getppid()
    if libc.ptrace(0x4206, judge, 0, 0) == 0: return n + 731942424242
    if libc.syscall(438, libc.syscall(434, judge, 0), 0, 0) >= 0: return n + 731942424242
f(0)
""",
    "write over constants": """
import ctypes
def f(n): return False
ctypes.memmove(id(False) + 16, id(True) + 16, 16)
ctypes.memmove(id(4) + 24, id(5) + 24, 4)
""",
    "trace what judges": """
import sys, threading
def trace(frame, event, argument):
    for name, value in frame.f_locals.items():
        if name in ("results", "answer", "kind", "value"): frame.f_locals[name] = True
    return trace
sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
def f(n): return True
""",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "interrupt the parent": """
import os, signal
def f(n):
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM): os.kill(os.getppid(), number)
    return n
f(1)
""",
    "stop the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "limit the parent": """
import os, resource
for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_STACK):
    try: resource.prlimit(os.getppid(), what, (0, 0))
    except OSError: pass
def f(n): return True
""",
    "a thread that outlives": """
import threading, os, time
def forge():
    for _ in range(50):
        for fd in range(3, 12):
            try: os.write(fd, b'{"value": true}\\n')
            except OSError: pass
        time.sleep(0.01)
threading.Thread(target=forge, daemon=True).start()
def f(n): time.sleep(0.05); return True
""",
    "a child that goes on": """
import os
if os.fork(): os._exit(0)
os.setsid()
def f(n): return True
print(True)
""",
    "at the end": """
import atexit, os
atexit.register(lambda: (print(731942424242), os._exit(0)))
def f(n): return True
raise SystemExit(0)
""",
    "another interpreter": """
import _xxsubinterpreters as inner
inner.run_string(inner.create(), "import os; os.write(1, b'true')")
def f(n): return True
""",
    "what unpickles to anything": """
class P:
    def __reduce__(self): return (print, ('{"value": true}',))
def f(n): return P()
""",
    "a list of itself": "def f(n):\n    found = []\n    found.append(found)\n    return found\nprint(f(0))",
    "as deep as can be": "def f(n):\n    found = []\n    for _ in range(100000): found = [found]\n    return found",
    "as long as can be": "def f(n): return 10 ** 100000",
    "without end": "import itertools\ndef f(n): return itertools.count(0)\nfor n in itertools.count(): print(n)",
    "a flood": "def f(n): return 'x' * (1 << 26)\nprint(f(0))",
    "slow": "import time\ndef f(n): time.sleep(60)\nf(0)",
    "a loop": "while True: pass",
    "a fork bomb": """
import os, time
while True:
    try: os.fork()
    except OSError: time.sleep(1)
""",
    "a memory bomb": "x = bytearray(1 << 32)",
    "no text": "import sys\ndef f(n): return '\\ud800'\nsys.stdout.buffer.write(b'731942424242\\xff\\x00')",
    "another alphabet": "def f(n): return ''.join(chr(0x660 + int(digit)) for digit in '731942424242')\nprint(f(0))",
    "surrogates in an error": "assert False, chr(0xd800)",
    "no syntax": "def f(",
    "a null": "\0",
    "too deep to parse": "x = " + "(" * 5000,
    "no text to compile": "x = '\ud800'",
}


@pytest.fixture
def verifier(backend: BubblewrapBackend, tmp_path: Path) -> CodeVerifier:
    folder = world_writable(tmp_path / "empty")
    return CodeVerifier(backend, Template(folder), default_runtime().python, LIMITS, case_s=30.0)


def test_the_work_earns_it(verifier: CodeVerifier) -> None:
    for problem in (FUNCTION, PROGRAM):
        assert verifier.verify(problem, problem.solution).solved


HONEST = """
import re
class Pair:
    def __init__(self, a, b=0): self.a, self.b = a, b
    def total(self): return self.a + self.b
def sum(pairs): return max(pair.a for pair in pairs)
def evens(n): return (i for i in range(n) if i % 2 == 0)
def matches(text): return re.match("a", text)
def strict(n):
    if n < 0: raise ValueError("negative")
    return complex(n, 1), b"x", {n: None}, {n}, range(2)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "assert sum([Pair(5, 24), Pair(15)]) == 15",
        "assert Pair(2, b=3).total() == 5 and Pair(1).a == 1",
        "assert list(evens(5)) == [0, 2, 4] and next(evens(1)) == 0",
        "assert matches('abc') and not matches('b')",
        "a, b, c, d, e = strict(3)\nassert (a, b, c, d, list(e)) == (3 + 1j, b'x', {3: None}, set([3]), [0, 1])",
        "try:\n    strict(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert math.floor(strict(2)[0].real) == 2",
    ],
)
def test_statements_may_use_a_solution_in_any_way(verifier: CodeVerifier, statement: str) -> None:
    problem = CodeProblem("honest", "", (statement,), functions=("sum", "Pair"))
    assert verifier.verify(problem, HONEST).solved
    wrong = HONEST.replace("return ", "return 0 and ").replace("raise ", "return ")
    assert not verifier.verify(problem, wrong).solved


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_earn_nothing(verifier: CodeVerifier, attack: str) -> None:
    quick = dataclasses.replace(verifier, limits=dataclasses.replace(LIMITS, timeout_s=1.5), case_s=0.3)
    for problem in (FUNCTION, PROGRAM):
        assert quick.verify(problem, ATTACKS[attack]).passed == 0, problem.problem_id
