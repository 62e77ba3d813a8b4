"""The task: sort digits. A prompt of k digits, ``3 1 2 >``, is answered by the same digits in order, ``1 2 3 .``

The teacher of the warm-up is sloppy: the longer the prompt, the likelier it only copies it. So groups come out all
right, all wrong and mixed by themselves, and what is left to learn is to sort every time.
"""

from __future__ import annotations

import torch

SHORTEST, LONGEST = 2, 5
ASK, END, PAD = 10, 11, 12  # 0 to 9 are the digits
VOCABULARY = 16
PROMPT = LONGEST + 1  # prompts are padded on the left to this width, and end with ASK
ANSWER = LONGEST + 1  # the longest right answer ends with END


def make_prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` prompts [count, PROMPT], int64; their lengths go round from SHORTEST to LONGEST."""
    prompts = torch.full((count, PROMPT), PAD)
    for row in range(count):
        digits = SHORTEST + row % (LONGEST - SHORTEST + 1)
        prompts[row, -1 - digits : -1] = torch.randint(0, 10, (digits,), generator=generator)
        prompts[row, -1] = ASK
    return prompts


def right_answers(prompts: torch.Tensor) -> torch.Tensor:
    """The sorted digits and END of each prompt [R, PROMPT], padded on the right to [R, ANSWER]."""
    answers = torch.full((len(prompts), ANSWER), PAD)
    for row, prompt in enumerate(prompts):
        digits = prompt[prompt < 10].sort().values
        answers[row, : len(digits)] = digits
        answers[row, len(digits)] = END
    return answers


def sloppy_answers(prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What the teacher answers, [R, ANSWER]: sorted, or copied with a chance that grows with the number of digits."""
    answers = right_answers(prompts)
    digits = (prompts < 10).sum(dim=1)
    copies = torch.rand(len(prompts), generator=generator) < (digits - SHORTEST) / (LONGEST - SHORTEST + 1)
    for row in torch.nonzero(copies).flatten().tolist():
        answers[row, : digits[row]] = prompts[row, -1 - digits[row] : -1]
    return answers


def reward(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 where an answer [R, ANSWER] is right in every token, else 0.0; float32 [R]."""
    return (answers == right_answers(prompts)).all(dim=1).float()
