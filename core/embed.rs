//! Shared by build scripts: compiles the files of a folder into a table.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

/// Writes `OUT_DIR/NAME.rs`: a list with the name and the text of each TOML file in the folder
/// `NAME` of the workspace.
///
/// # Errors
/// If the folder cannot be read, or the list cannot be written.
pub fn embed(name: &str) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("..").join(name);
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
    fs::write(Path::new(&env::var("OUT_DIR")?).join(format!("{name}.rs")), table)?;
    Ok(())
}
