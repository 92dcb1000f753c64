"""Two things that Triton's interpreter cannot do as a GPU does, in a form that both can."""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def loop_bound(value, INTERPRETED: tl.constexpr):
    """A scalar, as a bound of ``range``; to be used there, not through a variable.

    The interpreter's scalars are arrays of one number. Triton 3.6 turns them to int as they are, which NumPy refuses
    since 2.4; assigned to a variable, a number would become such an array again.
    """
    if INTERPRETED:
        return value.handle.data.item()
    return value


@triton.jit
def product(left, right, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """The matrix product in float32; widened for the interpreter, whose own takes bits of bfloat16 for integers."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)
