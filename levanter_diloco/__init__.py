"""DiLoCo and Streaming DiLoCo for Levanter.

Papers are cited by tag:
    [DiLoCo] Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv:2311.08105
    [Streaming] Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512
"""

__version__ = "0.1.0"
