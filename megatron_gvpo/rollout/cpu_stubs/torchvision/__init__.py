"""Stand-in for torchvision; a server of text models imports it for its image processors and calls nothing."""

from absent_package import stand_in

__version__ = "0.0.0"

stand_in(__name__)
