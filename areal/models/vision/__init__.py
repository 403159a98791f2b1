"""Vision towers: images cut to patches in, one embedding per image token of a decoder out."""
