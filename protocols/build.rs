//! Lists every protocol: a module of `lib.rs` is one if the `mod.rs` of its folder implements
//! `Registered`. Declaring the module is all it takes to register a protocol.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=src/lib.rs");
    let mut types = Vec::new();
    for line in fs::read_to_string("src/lib.rs")?.lines() {
        let module = line.strip_prefix("pub mod ").and_then(|rest| rest.strip_suffix(';'));
        let Some(module) = module else { continue };
        let path = format!("src/{module}/mod.rs");
        if !Path::new(&path).exists() {
            continue;
        }
        println!("cargo::rerun-if-changed={path}");
        let text = fs::read_to_string(&path)?;
        let registers = |line: &str| {
            let name = line.strip_prefix("impl Registered for ")?.strip_suffix(" {")?;
            Some(format!("crate::{module}::{name}"))
        };
        let found = text.lines().find_map(registers);
        let is_protocol = |line: &str| line.starts_with("impl Protocol for ");
        if found.is_none() && text.lines().any(is_protocol) {
            return Err(format!("{path}: add `impl Registered for …`, in one line").into());
        }
        types.extend(found);
    }
    let list = format!("protocols![{}];", types.join(", "));
    fs::write(Path::new(&env::var("OUT_DIR")?).join("protocols.rs"), list)?;
    Ok(())
}
