//! Embeds every file of `topologies/`: adding one is all it takes to add a topology.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../topologies");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut rows = Vec::new();
    for file in fs::read_dir(&folder)? {
        let path = file?.path();
        if path.extension().is_some_and(|ending| ending == "toml") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            rows.push(format!("({name:?}, include_str!({:?})),", path.display().to_string()));
        }
    }
    rows.sort();
    let table = format!("&[{}]", rows.concat());
    fs::write(Path::new(&env::var("OUT_DIR")?).join("topologies.rs"), table)?;
    Ok(())
}
