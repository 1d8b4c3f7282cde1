"""From a step's reports in pinned memory to the log-probabilities that its rows asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.engine.plan import RowResult, TokenLogprobs
from worker.engine.runner import NOT_NUMBERS
from worker.gpu.staging import HostStage
from worker.kernels.logprobs import read_reports
from worker.kernels.processors import Asked
from worker.kernels.row_state import Field


@dataclass(slots=True)
class Reports:
    """Log-probabilities that a step's rows ask for, and where each row's lie among them."""

    values: torch.Tensor  # int32 [num, REPORT_WIDTH], pinned; there once the step has ended
    firsts: list[int]  # of each row
    num_prompts: list[int]  # of each row's, those of prompt tokens, which come first
    num_tops: list[int]  # alternatives of each row's tokens; -1: no report
    num_prompt_tops: list[int]

    @classmethod
    def of(cls, values: torch.Tensor, host: HostStage, num_rows: int) -> Reports:
        """Those of a step that was staged so."""
        asked = host.asked[:, :num_rows]
        return cls(
            values,
            asked[Asked.REPORT].tolist(),
            host.fields[Field.NUM_PROMPT, :num_rows].tolist(),
            asked[Asked.NUM_TOP].tolist(),
            asked[Asked.NUM_PROMPT_TOP].tolist(),
        )

    def add_to(self, rows: list[RowResult]) -> None:
        """Give each result what its row asks for: reports of tokens that were taken."""
        for index, row in enumerate(rows):
            first, num_prompt = self.firsts[index], self.num_prompts[index]
            if num_prompt:
                num_top = self.num_prompt_tops[index]
                row.prompt_logprobs = self._read(row, first, num_prompt, num_top)
            if self.num_tops[index] >= 0 and row.token_ids:
                first += num_prompt
                row.logprobs = self._read(row, first, len(row.token_ids), self.num_tops[index])

    def _read(self, row: RowResult, first: int, num: int, num_top: int) -> TokenLogprobs:
        found = TokenLogprobs(*read_reports(self.values[first : first + num].numpy(), num_top))
        if np.isnan(found.chosen).any():
            row.error = NOT_NUMBERS
        return found
