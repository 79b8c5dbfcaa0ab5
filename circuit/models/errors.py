"""Errors of reading a checkpoint; every class has one sentence and a hint."""

from ir.errors import CircuitError


class CheckpointError(CircuitError):
    """A checkpoint cannot be used as it is."""


class PathMissing(CheckpointError):
    """The path given as a model does not exist."""

    says = "{path} does not exist."
    hint = (
        "Give a GGUF file, a folder with config.json and safetensors, or a hub id such as "
        "owner/name."
    )


class NotAModel(CheckpointError):
    """The path exists and holds no checkpoint."""

    says = "{path} is not a model: {why}."
    hint = "A model is a GGUF file, or a folder with config.json and *.safetensors."


class Unreadable(CheckpointError):
    """The operating system refuses to read a file of the checkpoint."""

    says = "{path} cannot be read: {why}."
    hint = "Check its permissions and the disk it is on."


class BadMagic(CheckpointError):
    """A file named as GGUF does not begin as one."""

    says = "{path} is not a GGUF file: it begins with {found}, not with GGUF."
    hint = "The download may be an error page or a git-lfs pointer; fetch the file again."


class BadGguf(CheckpointError):
    """A GGUF file contradicts itself or uses a part of the format that is not read."""

    says = "{path}: {why}."
    hint = "Write the file again with a current converter (little endian, version 2 or 3)."


class TruncatedGguf(CheckpointError):
    """A GGUF file ends before what its header promises."""

    says = "{path} is truncated: {what} needs {need} bytes and the file has {have}."
    hint = "The download was cut short; fetch the file again."


class DuplicateKey(CheckpointError):
    """One name stands twice where it may stand once."""

    says = "{path}: {key} is given twice."
    hint = "Which of the two is meant cannot be known; write the file again."


class UnknownArchitecture(CheckpointError):
    """The checkpoint is of a family that has no graph here."""

    says = "{path} is of the architecture {found!r}, which is not one of {known}."
    hint = "Choose a checkpoint of a known family."


class ConfigRefused(CheckpointError):
    """The configuration has keys that are unknown, missing, or set to what is not modelled."""

    says = "{path} is refused, {count} reason(s):{problems}"
    hint = (
        "Nothing is ignored silently: each key must be used, be known to be harmless, or "
        "hold an allowed value."
    )

    def __init__(self, *, path, problems):
        self.problems = tuple(problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(path=path, count=len(self.problems), problems=listed)


class BadJson(CheckpointError):
    """A JSON file of the checkpoint cannot be parsed."""

    says = "{path} is not valid JSON: {why}."
    hint = "Fetch the file again."


class ShardMissing(CheckpointError):
    """The index names a shard that is not in the folder."""

    says = "{folder}: the index names {shard}, which is not there."
    hint = "Fetch the missing file, or the whole checkpoint again."


class ShardUnsafe(CheckpointError):
    """The index points outside the checkpoint's folder."""

    says = "{path}: the index names {shard!r}, which is not a plain file name."
    hint = "Only files in the folder itself are opened; do not trust this checkpoint."


class ShardBroken(CheckpointError):
    """A safetensors file and its header do not agree."""

    says = "{path} is damaged: {why}."
    hint = "The file was cut short or altered; fetch it again."


class TensorNotInShard(CheckpointError):
    """The index maps a tensor to a shard which does not hold it."""

    says = "{folder}: the index puts {tensors} in {shard}, which does not hold it."
    hint = "Index and shards come from different checkpoints; fetch them together."


class TensorsUnfit(CheckpointError):
    """The stored tensors are not those that the configuration calls for."""

    says = "{path} does not fit its configuration:{problems}"
    hint = (
        "Configuration and weights come from different checkpoints, or the conversion went wrong."
    )

    def __init__(self, *, path, problems):
        self.problems = tuple(problems)
        super().__init__(path=path, problems="".join(f"\n  - {p}" for p in self.problems))


class MissingTensor(TensorsUnfit):
    """The configuration calls for a tensor which is not stored."""


class UnexpectedTensor(TensorsUnfit):
    """A stored tensor has no place in the model."""


class MisshapenTensor(TensorsUnfit):
    """A stored tensor has another shape than the configuration gives."""


class UnknownFormat(TensorsUnfit):
    """A stored tensor has a number format that is not read."""

    hint = "Use a file with F32, F16, BF16, Q8_0, Q4_0 or Q4_1 tensors."


class NotFinite(CheckpointError):
    """A weight is NaN or infinite."""

    says = "{path}: {tensor} holds {count} value(s) that are NaN or infinite ({what})."
    hint = "The weights are damaged, or overflowed when they were converted."


class TiedHeadDiffers(CheckpointError):
    """Embedding and head are declared to be one tensor and are stored as two unequal ones."""

    says = "{path} ties embedding and head, yet stores {embedding} and {head} with unequal values."
    hint = "Set tie_word_embeddings to false if the head is meant, or remove the stored head."


class TokenizerMissing(CheckpointError):
    """The checkpoint has no tokenizer."""

    says = "{path} has no tokenizer."
    hint = "Add tokenizer.json (a folder), or the tokenizer.ggml.* keys (a GGUF file)."


class TokenizerRefused(CheckpointError):
    """The tokenizer is of a kind that is not modelled."""

    says = "{path}: the tokenizer is refused: {why}."
    hint = (
        "Byte-level BPE (any tokenizer.json; GGUF types smollm, gpt-2, llama-bpe, qwen2) is read."
    )


class TextRefused(CheckpointError):
    """The text cannot be written as UTF-8."""

    says = "The text has half of a surrogate pair at character {index}."
    hint = "Decode the text with errors='replace' first."


class ChatRefused(CheckpointError):
    """The chat template is absent, broken, or refuses the messages."""

    says = "The chat template cannot be rendered: {why}."
    hint = (
        "Pass plain text, or messages as a list of {{role, content}} records in the "
        "template's order."
    )


class HubUnavailable(CheckpointError):
    """A hub id cannot be fetched."""

    says = "{source} cannot be fetched from the hub: {why}."
    hint = "{advice}"
