"""How many workers, decisions and jobs does one router bear?"""
