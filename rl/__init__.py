from rl.moved import name_what_moved

name_what_moved()
