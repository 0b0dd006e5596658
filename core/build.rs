//! Embeds every file of `topologies/`: adding one is all it takes to add a topology.

mod embed;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    embed::embed("topologies")
}
