"""How good are the demo models?"""
