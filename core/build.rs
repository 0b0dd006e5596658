//! Embeds every file of `topologies/`. To add a topology, add a file there.

mod embed;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    embed::embed("topologies")
}
