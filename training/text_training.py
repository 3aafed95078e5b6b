"""Training the text encoder of `shapes` to understand prompts, before it learns what they look like.

Left to the loss of pictures alone it stays a bag of words: which colour is whose is told apart only
where there is next to nothing but noise, and that is too rare to learn from. So heads that are thrown
away afterwards read from each token what the whole prompt says: for every colour whether it is the
background or which shape has it, and that shape's motion, size and relation; and the place.

Legend: B prompts, L tokens, D width, Q questions that a prompt answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.flow_model import text_states
from training.graphs import Recorder, with_gradients
from training.reservoir import padded
from training.scenes import (
    COLOURS,
    MOTIONS,
    OPPOSITE,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    STILL,
    Scene,
)
from training.session import Average, Session
from training.supply import Batch, Supply, some_prompt, some_scene, token_ids

LEARNING_RATE = 1e-3
EMA_DECAY = 0.998
BATCH = 512
LAST_SHARE = 0.5
"""Of the loss, what is read from a prompt's last token; the rest is read from all the others."""

ROLES = ("absent", "background", *SHAPES)
MOTION_ANSWERS = ("absent", STILL, *MOTIONS)
SIZE_ANSWERS = ("absent", "untold", *SIZES)
RELATION_ANSWERS = ("absent", "untold", *RELATIONS)
PLACE_ANSWERS = ("untold", *PLACES)
QUESTIONS_OF_A_COLOUR = (ROLES, MOTION_ANSWERS, SIZE_ANSWERS, RELATION_ANSWERS)
KINDS = (*((len(COLOURS), len(answers)) for answers in QUESTIONS_OF_A_COLOUR), (1, len(PLACE_ANSWERS)))
"""Of each kind of question: how many there are, and how many answers each has."""
NUM_LOGITS = sum(count * answers for count, answers in KINDS)


def train_text(session: Session, text_encoder: Any, supply: Supply, *, batch: int = BATCH) -> None:
    """Train until the session's time is over; the weights end as their moving average."""
    text_encoder.to(session.device).train()
    heads = nn.Linear(text_encoder.config.d_model, NUM_LOGITS, device=session.device)
    average = Average({"text_encoder": text_encoder, "heads": heads}, decay=EMA_DECAY)
    parameters = [*text_encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=session.is_cuda
    )
    session.begin(average=average, optimizers={"adamw": optimizer})
    prompts = _prompts(supply, session.device, batch, seed=f"text-{session.seed}-{session.step}")
    recorder = Recorder(session.device, uses_graphs=session.uses_graphs)
    step_of = with_gradients(parameters, lambda *prompt: (text_loss(text_encoder, heads, *prompt),))
    replay = recorder.capture(step_of, *next(prompts))
    for _ in session.steps():
        (loss,) = replay(*next(prompts))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        session.update(loss=loss)
    average.swap_in()
    text_encoder.eval()
    session.log(understood=round(understood(text_encoder, heads), 4))


def text_loss(text_encoder: Any, heads: nn.Linear, tokens_BL: Tensor, answers_BQ: Tensor) -> Tensor:
    """Cross-entropy of the answers, summed over questions; prompts without words do not count."""
    mask_BL = tokens_BL != 0
    states_BLD = text_states(text_encoder, tokens_BL, mask_BL)
    entropy_BL = states_BLD.new_zeros(tokens_BL.shape)
    for logits_BLNA, right_BN in zip(_by_kind(heads(states_BLD)), _by_kind_of(answers_BQ), strict=True):
        right_BLN = right_BN[:, None].expand(logits_BLNA.shape[:-1])
        entropy_BLN = F.cross_entropy(logits_BLNA.movedim(-1, 1), right_BLN, reduction="none")
        entropy_BL = entropy_BL + entropy_BLN.sum(dim=-1)
    is_last_BL = _is_last(mask_BL)
    has_words_B1 = mask_BL.sum(dim=1, keepdim=True) > 1
    last_BL, other_BL = (is_last_BL & has_words_B1).float(), (mask_BL & ~is_last_BL).float()
    of_last = (entropy_BL * last_BL).sum() / last_BL.sum().clamp(min=1)
    of_others = (entropy_BL * other_BL).sum() / other_BL.sum().clamp(min=1)
    return LAST_SHARE * of_last + (1 - LAST_SHARE) * of_others


def _by_kind(logits: Tensor) -> list[Tensor]:
    """Logits of each kind of question: [..., questions, answers]."""
    parts = torch.functional.split(logits, [questions * answers for questions, answers in KINDS], dim=-1)
    return [part.view(*part.shape[:-1], *kind) for part, kind in zip(parts, KINDS, strict=True)]


def _by_kind_of(answers_BQ: Tensor) -> tuple[Tensor, ...]:
    return torch.functional.split(answers_BQ, [questions for questions, _ in KINDS], dim=1)


def _is_last(mask_BL: Tensor) -> Tensor:
    return mask_BL & ~F.pad(mask_BL[:, 1:], (0, 1))


def answers_of(scene: Scene) -> list[int]:
    """What a prompt for this scene says, a number for each of the Q questions."""
    by_colour = {}
    if scene.says_background:
        by_colour[scene.background] = (ROLES.index("background"), 0, 0, 0)
    for idx, thing in enumerate(scene.things):
        relation = scene.relation if idx == 0 or scene.relation is None else OPPOSITE[scene.relation]
        by_colour[thing.colour] = (
            ROLES.index(thing.shape),
            MOTION_ANSWERS.index(thing.motion),
            SIZE_ANSWERS.index(thing.size if thing.says_size else "untold"),
            RELATION_ANSWERS.index(relation or "untold"),
        )
    columns = zip(*(by_colour.get(colour, (0, 0, 0, 0)) for colour in COLOURS), strict=True)
    return [*itertools.chain.from_iterable(columns), PLACE_ANSWERS.index(scene.place or "untold")]


def _prompts(
    supply: Supply, device: torch.device, count: int, *, seed: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of tokens ([B, L]) and answers ([B, Q])."""
    for batch in supply.stream(width=128, height=128, count=count, seed=seed):
        yield _on_device(batch, device)


def _on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    answers = torch.tensor([answers_of(scene) for scene in batch.scenes], dtype=torch.int16)
    return padded(batch.tokens).to(device).long(), answers.to(device).long()


@torch.no_grad()
def understood(text_encoder: Any, heads: nn.Linear, *, count: int = 1000) -> float:
    """The share of held-out prompts of whose last token all answers are read rightly."""
    rng = Random("understood")
    scenes = tuple(some_scene(rng, width=128, height=128, held_out=True) for _ in range(count))
    tokens = tuple(tuple(token_ids(some_prompt(scene, rng))) for scene in scenes)
    tokens_BL, answers_BQ = _on_device(Batch(scenes, tokens), heads.weight.device)
    mask_BL = tokens_BL != 0
    states_BLD = text_states(text_encoder, tokens_BL, mask_BL)
    by_kind = _by_kind(heads(states_BLD[_is_last(mask_BL)]))
    found_BQ = torch.cat([logits_BNA.argmax(dim=-1) for logits_BNA in by_kind], dim=1)
    return float((found_BQ == answers_BQ).all(dim=1).float().mean())
