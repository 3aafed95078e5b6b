"""UniPC that never waits for a device.

diffusers' solver moves each step's coefficients to the samples' device and solves for them there. Every such
copy and solution makes the host wait for all work on the device. Here the coefficients are computed on the
CPU, where the sigmas are. On a CPU the arithmetic and its order are the same, so the bits are, too.

Legend: t the target sigma of a step, s its source.
Source: diffusers 0.42 UniPCMultistepScheduler.multistep_uni_p_bh_update and multistep_uni_c_bh_update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Coefficients of one step: tensors without dimensions on the CPU."""

    of_sample: Tensor
    of_output: Tensor
    of_rest: Tensor
    rks: list[Tensor]
    """For the earlier outputs, the latest first, and 1 for the newest."""
    matrix: Tensor
    right_side: Tensor


class HostUniPC(UniPCMultistepScheduler):  # type: ignore[misc]
    """The same solver, for samples on any device."""

    def multistep_uni_p_bh_update(
        self, model_output: Tensor, *args: Any, sample: Tensor, order: int, **kwargs: Any
    ) -> Tensor:
        """The predictor: from the present sigma to the next one."""
        assert not args
        assert not kwargs
        assert self.solver_p is None
        m_s = self.model_outputs[-1]
        found = self._coefficients(self.step_index + 1, order)
        differences = self._differences(found, m_s)
        rhos = torch.ones(1, dtype=sample.dtype) * 0.5  # diffusers simplifies order 2
        if order > 2:
            rhos = torch.linalg.solve(found.matrix[:-1, :-1], found.right_side[:-1]).to(sample.dtype)
        predicted: Tensor = found.of_sample * sample - found.of_output * m_s
        predicted = predicted - found.of_rest * _combined(rhos, differences)
        return predicted.to(sample.dtype)

    def multistep_uni_c_bh_update(
        self,
        this_model_output: Tensor,
        *args: Any,
        last_sample: Tensor,
        this_sample: Tensor,
        order: int,
        **kwargs: Any,
    ) -> Tensor:
        """The corrector: repeats the step to the present sigma with the model's output there."""
        assert not args
        assert not kwargs
        m_s = self.model_outputs[-1]
        found = self._coefficients(self.step_index, order)
        differences = self._differences(found, m_s)
        rhos = torch.ones(1, dtype=last_sample.dtype) * 0.5
        if order > 1:
            rhos = torch.linalg.solve(found.matrix, found.right_side).to(last_sample.dtype)
        corrected: Tensor = found.of_sample * last_sample - found.of_output * m_s
        rest = _combined(rhos[:-1], differences) + rhos[-1] * (this_model_output - m_s)
        corrected = corrected - found.of_rest * rest
        return corrected.to(last_sample.dtype)

    def _coefficients(self, t_idx: int, order: int) -> _Coefficients:
        """Coefficients of the step from sigma `t_idx` - 1 to sigma `t_idx`."""
        alpha_t, sigma_t = self._sigma_to_alpha_sigma_t(self.sigmas[t_idx])
        alpha_s, sigma_s = self._sigma_to_alpha_sigma_t(self.sigmas[t_idx - 1])
        lambda_s = self._lambda(t_idx - 1)
        h = self._lambda(t_idx) - lambda_s
        rks = [(self._lambda(t_idx - 1 - back) - lambda_s) / h for back in range(1, order)]
        rks.append(torch.ones(()))
        hh = -h if self.predict_x0 else h
        h_phi_1 = torch.expm1(hh)
        b_h = hh if self.config.solver_type == "bh1" else torch.expm1(hh)
        h_phi_k, factorial = h_phi_1 / hh - 1, 1
        matrix, right_side = [], []
        for power in range(order):
            matrix.append(torch.pow(torch.stack(rks), power))
            right_side.append(h_phi_k * factorial / b_h)
            factorial *= power + 2
            h_phi_k = h_phi_k / hh - 1 / factorial
        is_x0 = self.predict_x0
        return _Coefficients(
            of_sample=sigma_t / sigma_s if is_x0 else alpha_t / alpha_s,
            of_output=(alpha_t if is_x0 else sigma_t) * h_phi_1,
            of_rest=(alpha_t if is_x0 else sigma_t) * b_h,
            rks=rks,
            matrix=torch.stack(matrix),
            right_side=torch.stack(right_side),
        )

    def _lambda(self, idx: int) -> Tensor:
        alpha, sigma = self._sigma_to_alpha_sigma_t(self.sigmas[idx])
        return torch.log(alpha) - torch.log(sigma)

    def _differences(self, found: _Coefficients, m_s: Tensor) -> list[Tensor]:
        earlier = reversed(self.model_outputs[:-1])
        return [(output - m_s) / rk for output, rk in zip(earlier, found.rks[:-1], strict=False)]


def _combined(rhos: Tensor, differences: list[Tensor]) -> Tensor | int:
    """The sum of the differences, each times its rho."""
    if not differences:
        return 0
    if len(differences) == 1:
        return rhos[0] * differences[0]  # the same bits without a copy to the device
    on_device = rhos.to(differences[0].device, non_blocking=True)
    return torch.einsum("k,bkc...->bc...", on_device, torch.stack(differences, dim=1))
