"""Tiny node models with random weights. The classes are real, saved as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertTokenizerFast,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoProcessor,
    Sam2Config,
    Sam2Model,
    Sam2VideoConfig,
    Sam2VideoModel,
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamProcessor,
    SamPromptEncoderConfig,
    SamVisionConfig,
    Swin2SRConfig,
    Swin2SRForImageSuperResolution,
    SwinConfig,
    ViTImageProcessor,
)
from transformers.models.grounding_dino.image_processing_pil_grounding_dino import (
    GroundingDinoImageProcessorPil,
)
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

from maskserve_studies.training.text import build_clip_tokenizer


def build_find(folder: Path) -> None:
    """A CLIPSeg that finds arbitrary regions."""
    torch.manual_seed(3)
    tokenizer = build_clip_tokenizer()
    config = CLIPSegConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        projection_dim=16, extract_layers=[0], reduce_dim=8, decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )  # fmt: skip
    CLIPSegForImageSegmentation(config).save_pretrained(folder)
    images = ViTImageProcessor(size={"height": 32, "width": 32})
    CLIPSegProcessor(images, tokenizer).save_pretrained(folder)


def build_likeness(folder: Path) -> None:
    """A CLIP that gives arbitrary likenesses."""
    torch.manual_seed(5)
    tokenizer = build_clip_tokenizer()
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        projection_dim=16,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)


def build_grounded(find: Path, segment: Path) -> None:
    """A GroundingDINO that finds arbitrary boxes, and a SAM that finds arbitrary regions
    in them.
    """
    torch.manual_seed(6)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", "red", "star", "heart"]
    (find.parent / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(find.parent / "vocab.txt"))
    backbone = SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1], num_heads=[1, 1, 1],
        window_size=4, out_features=["stage2", "stage3"],
    )  # fmt: skip
    text = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    config = GroundingDinoConfig(
        backbone_config=backbone, text_config=text, num_queries=8, d_model=32, encoder_layers=1,
        encoder_ffn_dim=16, encoder_attention_heads=2, decoder_layers=2, decoder_ffn_dim=16,
        decoder_attention_heads=2, num_feature_levels=2, encoder_n_points=2, decoder_n_points=2,
        max_text_len=16,
    )  # fmt: skip
    GroundingDinoForObjectDetection(config).save_pretrained(find)
    images = GroundingDinoImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 48})
    GroundingDinoProcessor(images, tokenizer).save_pretrained(find)
    SamModel(
        SamConfig(
            vision_config=SamVisionConfig(
                hidden_size=16, output_channels=8, num_hidden_layers=1, num_attention_heads=2,
                image_size=64, patch_size=16, mlp_dim=16, window_size=2, global_attn_indexes=[0],
                num_pos_feats=4,
            ),
            prompt_encoder_config=SamPromptEncoderConfig(
                hidden_size=8, image_size=64, patch_size=16, mask_input_channels=4
            ),
            mask_decoder_config=SamMaskDecoderConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2, mlp_dim=16,
                iou_head_hidden_dim=8,
            ),
        )
    ).save_pretrained(segment)  # fmt: skip
    SamProcessor(
        SamImageProcessorPil(
            size={"longest_edge": 64}, pad_size={"height": 64, "width": 64},
            mask_size={"longest_edge": 16}, mask_pad_size={"height": 16, "width": 16},
        )
    ).save_pretrained(segment)  # fmt: skip


def build_enlarge(folder: Path) -> None:
    """A Swin2SR that doubles a picture's sides."""
    torch.manual_seed(4)
    config = Swin2SRConfig(
        image_size=16, embed_dim=12, depths=[1], num_heads=[2], window_size=4, drop_path_rate=0.0,
        upsampler="pixelshuffledirect",
    )  # fmt: skip
    Swin2SRForImageSuperResolution(config).save_pretrained(folder)


def build_segment(folder: Path) -> None:
    """A SAM that answers clicks with arbitrary regions."""
    torch.manual_seed(5)
    prompt = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {
        "hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 16,
        "num_hidden_layers": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 64, "patch_size": 16, "mlp_dim": 16, "window_size": 2,
        "global_attn_indexes": [0], "num_pos_feats": 8,
    }  # fmt: skip
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    SamModel(config).save_pretrained(folder)
    images = SamImageProcessorPil(size={"longest_edge": 64}, pad_size={"height": 64, "width": 64})
    SamProcessor(images).save_pretrained(folder)


def build_segment_2(folder: Path, films: bool = False) -> None:
    """A SAM 2 that answers clicks with arbitrary regions.

    Args:
        folder: of the model.
        films: save it as the hub's models for films are saved.
    """
    torch.manual_seed(7)
    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 2, 2, 2], "window_size_per_stage": [4, 4, 2, 2],
        "global_attention_blocks": [3], "window_positional_embedding_background_size": [4, 4],
    }  # fmt: skip
    parts = {
        "vision_config": {
            "model_type": "sam2_vision_model", "backbone_config": backbone, "fpn_hidden_size": 16,
            "backbone_channel_list": [64, 32, 16, 8],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        "prompt_encoder_config": {
            "hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4
        },
        "mask_decoder_config": {
            "hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 16
        },
    }  # fmt: skip
    if films:
        memory = {
            "image_size": 64, "memory_attention_hidden_size": 16, "memory_attention_num_layers": 1,
            "memory_attention_feed_forward_hidden_size": 16, "memory_encoder_hidden_size": 16,
            "memory_encoder_output_channels": 8, "mask_downsampler_embed_dim": 16,
            "memory_fuser_embed_dim": 16, "memory_fuser_intermediate_dim": 16,
            "memory_fuser_num_layers": 1,
        }  # fmt: skip
        Sam2VideoModel(Sam2VideoConfig(**parts, **memory)).save_pretrained(folder)
    else:
        Sam2Model(Sam2Config(**parts)).save_pretrained(folder)
    # The hub's files, written by hand because the class that writes them needs torchvision.
    pictures = {
        "image_processor_type": "Sam2ImageProcessorFast",
        "size": {"height": 64, "width": 64},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    whole = {"processor_class": "Sam2VideoProcessor", "target_size": 64, "point_pad_value": -10}
    (folder / "processor_config.json").write_text(json.dumps(whole))
