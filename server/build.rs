//! Generates the messages and services of the client API with `protox` instead of `protoc`, so that
//! a build needs nothing but cargo.

use std::error::Error;

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
    Ok(())
}
