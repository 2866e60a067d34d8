"""What Fresco does on this machine's GPU, in minutes: `python -m experiments.gpu --minutes 10 [PART …]`.

`__main__` runs the parts, each in a process of its own with a limit of its own. `bundle` makes what an offline machine
lacks. On a CPU (`--device cpu`, or DEV=cpu) every part runs on tiny sizes: that says whether it works, not how fast.
"""
