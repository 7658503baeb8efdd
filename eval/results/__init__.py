"""A results folder: records of answers, and the folders of kvpress."""
