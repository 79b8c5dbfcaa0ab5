"""What can be wrong with a training run."""

from __future__ import annotations

from circuit.report import UsageError
from ir.errors import CircuitError


class NothingToResume(UsageError):
    says = "There is no training to resume at {path}."
    hint = "Leave out --resume to begin one."


class AlreadyBegun(UsageError):
    says = "{path} holds a training that was begun before."
    hint = "Go on with --resume, or remove that folder to begin again."


class OtherRun(UsageError):
    says = "The training at {path} was begun with {name} {before}, not {now}."
    hint = "Resume with the same options, or remove that folder to begin again."


class OutputIsFolder(UsageError):
    says = "{path} is a folder, but the head is one file."
    hint = "Give a file name, as head.safetensors."


class NotPrompts(UsageError):
    says = "{path} is not a JSON list of prompts."
    hint = 'Write it as ["first prompt", "second prompt"].'


class TooFewTexts(CircuitError):
    says = "The target wrote {count} usable texts, which is too few to train on."
    hint = "Ask for more with --tokens."


class Diverged(CircuitError):
    says = "The loss of step {step} is not a number."
    hint = "Resume from the last saved step, or begin again with a lower --learning-rate."


class BrokenRun(CircuitError):
    says = "{path} cannot be read as a part of a training run ({problem})."
    hint = "Remove the folder of the run and begin again."
