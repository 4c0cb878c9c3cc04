"""Words of the needles' keys: adjective-noun."""

_ADJECTIVES = """
able ancient amber arctic autumn bitter blue bold brave brief bright broken calm careful clever cold crimson curious
dark deep distant dusty eager early empty fancy fierce flat fresh gentle giant golden grand green happy hidden hollow
humble icy jolly keen large lazy light little lonely loud lucky mellow misty modest narrow noble odd old pale plain
polite proud purple quick quiet rapid rare round rusty shy silent silver simple sleepy small smooth soft solid steep
strong sudden sweet swift tall tame tender tiny vast warm weary white wild wise young
"""
_NOUNS = """
anchor apple arrow badge basket beacon bell bottle branch bridge brush bucket button cabin candle canyon carpet castle
cedar chapel cherry circle cliff coin comet copper coral cradle crown desert diamond door dragon drum eagle engine
falcon feather fiddle field flute forest fountain garden gate glacier hammer harbor hazel helmet hill island ivory
jacket jewel kettle ladder lake lantern lemon lion magnet maple marble meadow mirror mountain needle oak ocean orchard
otter palace panther pebble pencil pepper piano pillow planet pocket prairie quarry rabbit ribbon river robin rocket
saddle shadow shell signal spider spoon star stone summer table temple thunder tiger tower trumpet tunnel valley
vessel violin wagon walnut whistle willow window winter
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
