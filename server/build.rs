//! Generates the messages and services of the client API, and the messages between nodes and on
//! disk, with `protox` instead of `protoc` so that a build needs nothing but cargo.

use std::error::Error;
use std::fs;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=../proto");
    let files = protox::compile(["orthodrome.proto"], ["../proto"])?;
    tonic_prost_build::configure()
        // Values that were read are shared with the answer, not copied. Requests are copied: a key
        // that shared a request's buffer would keep all of it in memory.
        .bytes(".orthodrome.v1.KeyRead")
        .codec_path("crate::service::codec::Codec")
        .build_client(false)
        .compile_fds(files)?;

    let mut internal = Vec::new();
    for entry in fs::read_dir("../proto/internal")? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "proto") {
            internal.push(path);
        }
    }
    internal.sort();
    let files = protox::compile(internal, ["../proto/internal"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .build_client(false)
        .build_server(false)
        .include_file("internal.rs")
        .compile_fds(files)?;
    Ok(())
}
