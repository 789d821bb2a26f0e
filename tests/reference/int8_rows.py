"""Section 15: rows of 8 bits, computed for all rows of an update at once."""

from __future__ import annotations

import numpy as np

from reference import rounding

WORD = np.uint32(0xFFFFFFFF)


def random_bits(seed: int, step: int, rows: np.ndarray, dim: int) -> np.ndarray:
    """Computes `rounding.random_bits` of all columns of rows, int64 [n, dim]."""
    columns = np.arange(dim)
    blocks = columns // 64 * 8 + columns // 2 % 8
    key = (seed % 2**32, seed // 2**32, step % 2**32, step // 2**32)
    found, inverse = np.unique(blocks, return_inverse=True)
    words = _threefry(found[np.newaxis], rows[:, np.newaxis], key)[:, :, inverse]
    word = words[columns // 16 % 4, :, columns].T.astype(np.int64)
    return np.where(columns % 2, word >> 16, word & 0xFFFF)


def _threefry(block: np.ndarray, row: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
    """Computes `rounding.threefry` for arrays: uint32 [4, n, blocks]."""
    last = 0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3]
    keys = [np.uint32(k) for k in (*key, last)]
    zero = np.zeros(np.broadcast_shapes(block.shape, row.shape), np.uint32)
    words = (block.astype(np.uint32), row.astype(np.uint32), zero, zero)
    with np.errstate(over="ignore"):
        x = [word + zero + k for word, k in zip(words, keys, strict=False)]
        for number in range(1, 6):
            for place, bits in enumerate(rounding.ROTATIONS[(number - 1) % 2]):
                for first, second, by in zip((0, 2), (1, 3), bits, strict=True):
                    other = second if place % 2 == 0 else 4 - second
                    x[first] = x[first] + x[other]
                    left, right = np.uint32(by), np.uint32(32 - by)
                    x[other] = (x[other] << left | x[other] >> right) ^ x[first]
            x = [word + keys[(number + i) % 5] for i, word in enumerate(x)]
            x[3] = x[3] + np.uint32(number)
    return np.stack(x)


def values_of(codes: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Returns the values that the rows are read as, float32 [n, D]."""
    scale, offset = (grids.astype(np.float32)[:, k : k + 1] for k in (0, 1))
    return (codes.astype(np.float32) - np.float32(127.5)) * scale + offset


def exported_grid(
    low: np.ndarray, high: np.ndarray, bfloat16: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and offset, float32 [n, 1], that an int8 export gives to rows.

    The offset is the bfloat16 nearest to the middle; the scale covers both ends also
    after it was rounded to bfloat16.
    """
    low, high = low.astype(np.float64), high.astype(np.float64)
    offset = ((low + high) / 2).astype(bfloat16).astype(np.float64)
    reach = np.maximum(high - offset, offset - low) * (1 + 1 / 256)
    scale = (reach / 127.5).astype(bfloat16)
    return scale.astype(np.float32), offset.astype(np.float32)


@np.errstate(all="ignore")
def store(
    x: np.ndarray, grids: np.ndarray, rows: np.ndarray, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes [n, D], and scales and offsets [n, 2], of rows that became x."""
    dtype = grids.dtype
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale, offset = (grids.astype(np.float32)[:, k : k + 1] for k in (0, 1))
    finite = np.isfinite(x).all(1, keepdims=True)
    reach = np.float32(127.5) * scale
    keeps = (scale > 0) & (np.abs(low - offset) <= reach)
    keeps &= (np.abs(high - offset) <= reach) & (high - low > np.float32(204) * scale)
    ok = finite & np.isfinite(high - low)
    ends = np.where(ok, low, 0), np.where(ok, high, 0)
    new_scale, new_offset = exported_grid(*ends, dtype)
    ok &= np.isfinite(new_scale) & np.isfinite(new_offset)
    new_scale = np.where(new_scale < np.float32(2.0**-100), 0, new_scale)
    new_scale = np.where(ok, new_scale, np.nan)
    tiny = np.abs(new_offset) < np.finfo(np.float32).tiny
    new_offset = np.where(ok & ~tiny, new_offset, 0)
    scale = np.where(finite & keeps, scale, new_scale).astype(np.float32)
    offset = np.where(finite & keeps, offset, new_offset).astype(np.float32)
    steps = (x - offset) / scale * np.float32(65536)
    fixed = np.where(scale > 0, np.rint(steps), 0).astype(np.int64) + 8355840
    random = random_bits(seed, step, rows, x.shape[1])
    codes = np.clip(fixed + random >> 16, 0, 255)
    codes = np.where(scale > 0, codes, 128).astype(np.uint8)
    return codes, np.concatenate([scale, offset], 1).astype(dtype)
