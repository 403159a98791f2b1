#!/bin/bash
# a is gone
[ ! -e a ]
