//! Generates the client's side of the API, with `protox` instead of `protoc` so that a build needs
//! nothing but cargo.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=../proto/orthodrome.proto");
    let files = protox::compile(["orthodrome.proto"], ["../proto"])?;
    tonic_prost_build::configure().bytes(".").build_server(false).compile_fds(files)?;
    Ok(())
}
