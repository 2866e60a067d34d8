"""A user's module: columns that no file of Fresco names. It imports no torch, since the broker reads it too."""

from __future__ import annotations

from rl.wire.columns import Column

TEACHER_LOGP = Column("teacher_logp", "float32", masked=0.5)
ROUTED_EXPERTS = Column("routed_experts", "uint8", masked=255, shape=(2, 3))
GRADE = Column("grade", "float32", producer="environment", scope="turn")
HINTS = Column("hints", "int32", producer="environment", scope="sequence")
DIFFICULTY = Column("difficulty", "float32", producer="environment", scope="sample")
STUDENT_GAP = Column("student_gap", "float32", producer="learner")
OF_MODEL = Column("of_model", "uint16", shape=("layers", 2), covers="context", reads="forward")
TWICE = Column("logp_behavior", "int32")  # another declaration of a name that is taken
