"""A layout rebuilt from announced sizes is the announced one, or is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_agent.layout import ALIGNMENT, ArenaLayout


def sizes_of(layout: ArenaLayout) -> dict[str, int]:
    """What a worker announces."""
    return {
        "arena_bytes": layout.num_bytes,
        "block_bytes": layout.block_bytes,
        "num_base_blocks": layout.num_base_blocks,
        "num_extra_blocks": layout.num_extra_blocks,
        "image_offset": layout.image_offset,
        "image_bytes": layout.image_bytes,
    }


LAYOUTS = st.builds(
    ArenaLayout,
    block_bytes=st.integers(1, 10_000),
    draft_block_bytes=st.integers(0, 2_000),
    image_bytes=st.integers(1, 100_000),
    num_base_blocks=st.integers(1, 300),
)


@given(LAYOUTS)
def test_rebuilt(layout: ArenaLayout) -> None:
    """The same offsets and sizes come back, and the image lies inside the tail."""
    rebuilt = ArenaLayout.of_pool(**sizes_of(layout))
    assert sizes_of(rebuilt) == sizes_of(layout)
    assert rebuilt.image_offset % ALIGNMENT == 0
    assert layout.tail_offset <= rebuilt.image_offset
    assert rebuilt.image_offset + rebuilt.image_bytes <= rebuilt.num_bytes


@given(
    LAYOUTS,
    st.sampled_from(["arena_bytes", "num_extra_blocks", "image_offset"]),
    st.sampled_from([-1, 1, 17]),
)
def test_one_wrong_size_is_refused(layout: ArenaLayout, name: str, change: int) -> None:
    """A size that disagrees with the others is refused, and what is named is a size."""
    sizes = sizes_of(layout)
    with pytest.raises(
        ValueError, match=r"(image_offset|num_extra_blocks|arena_bytes) is|positive"
    ):
        ArenaLayout.of_pool(**{**sizes, name: sizes[name] + change})


@given(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 6))
def test_any_sizes(values: tuple[int, ...]) -> None:
    """Six arbitrary numbers give a layout with exactly them, or a ValueError."""
    sizes = dict(
        zip(
            sizes_of(
                ArenaLayout(block_bytes=1, draft_block_bytes=1, image_bytes=1, num_base_blocks=1)
            ),
            values,
            strict=True,
        )
    )
    with contextlib.suppress(ValueError):
        assert sizes_of(ArenaLayout.of_pool(**sizes)) == sizes
