"""How much work do published models take?"""
