//! Generates the messages and services of the client API, with `protox` instead of `protoc` so that
//! a build needs nothing but cargo.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=../proto/orthodrome.proto");
    let files = protox::compile(["orthodrome.proto"], ["../proto"])?;
    // `bytes` fields share the buffer a request arrived in instead of copying each key and value.
    tonic_prost_build::configure().bytes(".").build_server(false).compile_fds(files)?;
    Ok(())
}
