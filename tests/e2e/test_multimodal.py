"""Requests with images, preempted before, within and after them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import tokenizer
from checkpoints import COMMON as TEXT
from harness import BLOCK, Engine, Job, jobs
from reference import tokens_of_transformers

SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO, START, END = range(len(tokenizer.SPECIAL), len(tokenizer.SPECIAL) + len(SPECIAL))
PATCH, MERGE = 14, 2
# Pixels of a side, and the tokens that such an image becomes.
SIDE = 224
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2


def write_checkpoint(folder):
    """Writes a Qwen2-VL-like model with strong weights, and its processor."""
    config = transformers.Qwen2VLConfig(
        text_config=TEXT
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "type": "mrope",
                "mrope_section": [4, 6, 6],
                "rope_theta": 10000.0,
            },
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": TEXT["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan_in = math.prod(weight.shape[1:])
                std = 1 if "embed_tokens" in name else 2 / fan_in**0.5
                weight.normal_(0, std, generator=generator)
    model.save_pretrained(folder)
    transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE
        ),
        tokenizer=tokenizer.make(SPECIAL),
        video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class ImageJob(Job):
    """A request with a random image, for which the prompt has one token."""

    image: int = 0

    def picture(self):
        rng = np.random.default_rng(self.image)
        return Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))

    def inputs(self):
        return super().inputs() | {"multi_modal_data": {"image": self.picture()}}

    @property
    def expanded_prompt(self):
        """The prompt with as many tokens for the image as it becomes."""
        first = self.prompt.index(IMAGE)
        return (*self.prompt[:first], *[IMAGE] * IMAGE_TOKENS, *self.prompt[first + 1 :])

    def place(self, num_tokens):
        """Where the first ``num_tokens`` tokens end."""
        first = self.prompt.index(IMAGE)
        if num_tokens <= first:
            return "before"
        return "within" if num_tokens < first + IMAGE_TOKENS else "after"


def image_jobs():
    """Requests with an image each: some have the tokens of another one, but not its image."""
    cuts = (7, 90, 20, 110, 100, 30, 12, 28, 80)
    lengths = (60, 200, 90, 140, 120, 70, 160, 40, 150)
    for i, (cut, job) in enumerate(zip(cuts, jobs(51, lengths, max_tokens=40), strict=True)):
        # Random tokens must not stand for images themselves.
        text = [max(token, END + 1) for token in job.prompt]
        prompt = (*text[:cut], START, IMAGE, END, *text[cut:])
        for image in (2 * i, 2 * i + 1) if cut < BLOCK else (2 * i,):
            yield ImageJob(prompt, job.max_tokens, image=image)


EVERYONE = tuple(image_jobs())
# No more tokens in a step than this, so that images are computed in pieces.
STEP = 24
COMMON = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "skip_mm_profiling": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("multimodal"))


@pytest.fixture(scope="module")
def undisturbed(undisturbed_engine, checkpoint):
    return undisturbed_engine(checkpoint, **COMMON)


def test_undisturbed_tokens_are_those_of_transformers(checkpoint, undisturbed):
    reference = transformers.Qwen2VLForConditionalGeneration.from_pretrained(checkpoint)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint)
    tokens = undisturbed(EVERYONE)
    for i, job in enumerate(EVERYONE[:3]):
        prompt = job.expanded_prompt
        image = processor(images=job.picture(), return_tensors="pt")
        types = torch.tensor([[int(token == IMAGE) for token in prompt]])
        expected = tokens_of_transformers(
            reference, prompt, job.max_tokens, mm_token_type_ids=types, **image
        )
        assert expected == tokens[i]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_before_within_and_after_an_image(
    checkpoint, undisturbed, record, async_scheduling
):
    with Engine(
        checkpoint,
        31,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=STEP,
        scheduler_reserve_full_isl=False,
        **COMMON,
    ) as engine:
        outcome = engine.run(EVERYONE)
    record(
        outcome,
        EVERYONE,
        kind="images, M-RoPE",
        mode="prefix caching, preempted before, within and after an image",
        async_scheduling=async_scheduling,
    )
    assert outcome.tokens == undisturbed(EVERYONE)
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == len(EVERYONE)
    places = {EVERYONE[restore.job].place(restore.end) for restore in outcome.restores}
    assert places == {"before", "within", "after"}
    assert outcome.recomputed_tokens == 0
