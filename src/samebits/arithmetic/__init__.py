"""Executable arithmetics and owned primitives: the readable form, made of IEEE elementwise operations."""

from samebits.arithmetic.dots import dot as dot
from samebits.arithmetic.fma32 import fma as fma
from samebits.arithmetic.primitives import LOG2_E as LOG2_E
from samebits.arithmetic.primitives import exp2 as exp2
from samebits.arithmetic.primitives import exp2_core as exp2_core
from samebits.arithmetic.primitives import fold_halves as fold_halves
from samebits.arithmetic.primitives import lane_dot as lane_dot
from samebits.arithmetic.primitives import sigmoid as sigmoid
from samebits.arithmetic.rounding import canonical_nan as canonical_nan
from samebits.arithmetic.rounding import round_bf16 as round_bf16
