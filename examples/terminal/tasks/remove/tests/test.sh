#!/bin/bash
# a is gone
if [ ! -e a ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
