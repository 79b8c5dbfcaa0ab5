"""Triton's interpreter with the bf16 of the hardware.

The interpreter holds bf16 as 16-bit integers: it cuts f32 off where a device rounds to nearest,
ties to even, and multiplies the bits of matrices as numbers. Without what stands here, a kernel run
under it would differ from the same kernel on a device in the last bit of every stored value, and be
wrong in every matrix product.
"""

from __future__ import annotations

from ir.bits import bf16_bits, bf16_values


def round_as_hardware() -> None:
    """Makes f32 -> bf16 of the interpreter round to nearest even in this
    process; a second call changes nothing.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    if getattr(convert, "rounds", False):
        return

    def converted(data, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            return bf16_bits(data)
        if source == tl.bfloat16 and target == tl.float32:
            return bf16_values(data).view("uint32")
        return convert(data, source, target, mode)

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, *options):
        return plain_dot(self, *(_widened(interpreter, tl, x) for x in (a, b)), d, *options)

    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        """Bounds of loops may be arrays of one element, which numpy 2.4
        no longer turns into integers.
        """
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    converted.rounds = True
    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.create_dot = dot


def _widened(interpreter, tl, handle):
    """A bf16 operand as f32, anything else as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(bf16_values(handle.data), tl.float32)
