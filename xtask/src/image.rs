//! Builds a container image in the format of the Open Container Initiative, without Docker: the
//! program, the libraries that it loads, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::package::{commit_time, install, output, program, root, tidy, version, write};

/// The user that runs the program in a container.
const USER: &str = "65532";

/// Where a container has its data, as in the packages.
const DATA: &str = "var/lib/orthodrome";

/// Builds the image in `out`, and returns the path of an archive for `docker load`, `podman load`
/// and registries. Without a `given` program, it builds one whose servers cannot have a mutation.
pub fn run(given: Option<PathBuf>, out: &Path) -> Result<PathBuf> {
    let program = program(given)?;
    let version = version(&program)?;
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("no name of images is known for the architecture {other}"),
    };
    let stage = out.join("stage");
    if stage.exists() {
        fs::remove_dir_all(&stage).with_context(|| stage.display().to_string())?;
    }
    let files = stage.join("files");
    fill(&program, &files)?;
    let layout = stage.join("layout");
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).with_context(|| blobs.display().to_string())?;
    // Times of files are those of the commit, so that one commit always gives the same image.
    let time = commit_time().unwrap_or_else(|| "0".to_owned());

    let layer = stage.join("layer.tar");
    archive(&files, ".", "0", &time, &layer)?;
    append(&files, DATA, (USER, "0750"), (&time, &layer))?;
    append(&files, "tmp", ("0", "1777"), (&time, &layer))?;
    let content = digest(&layer)?;
    output(Command::new("gzip").args(["-6", "--no-name"]).arg(&layer))?;
    let layer = keep(&stage.join("layer.tar.gz"), &blobs)?;
    let created =
        output(Command::new("date").args(["--utc", "+%FT%TZ", "--date"]).arg(format!("@{time}")))?;
    let created = created.trim();
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {
            "User": format!("{USER}:{USER}"),
            "Env": ["PATH=/usr/bin"],
            "Entrypoint": ["/usr/bin/orthodrome"],
            "WorkingDir": format!("/{DATA}"),
            "Labels": {
                "org.opencontainers.image.title": "orthodrome",
                "org.opencontainers.image.version": version,
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{content}")] },
        "history": [{ "created": created, "created_by": "cargo xtask image" }],
    });
    let config = keep_json(&config, &stage, &blobs)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config.describe("application/vnd.oci.image.config.v1+json"),
        "layers": [layer.describe("application/vnd.oci.image.layer.v1.tar+gzip")],
    });
    let name = format!("orthodrome:{version}");
    let manifest = keep_json(&manifest, &stage, &blobs)?;
    let mut described = manifest.describe("application/vnd.oci.image.manifest.v1+json");
    if let Value::Object(fields) = &mut described {
        let annotations = json!({
            "io.containerd.image.name": format!("docker.io/library/{name}"),
            "org.opencontainers.image.ref.name": version,
        });
        fields.insert("annotations".into(), annotations);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [described],
    });
    write(&layout.join("index.json"), &index.to_string(), 0o644)?;
    write(
        &layout.join("oci-layout"),
        &json!({ "imageLayoutVersion": "1.0.0" }).to_string(),
        0o644,
    )?;
    // Versions of Docker before 25 look for this instead of the index.
    let path = |blob: &Blob| format!("blobs/sha256/{}", blob.digest);
    let older = json!([{ "Config": path(&config), "RepoTags": [name], "Layers": [path(&layer)] }]);
    write(&layout.join("manifest.json"), &older.to_string(), 0o644)?;
    tidy(&layout)?;

    let image = out.join(format!("orthodrome_{version}_{architecture}.oci.tar"));
    archive(&layout, ".", "0", &time, &image)?;
    fs::remove_dir_all(&stage).with_context(|| stage.display().to_string())?;
    Ok(image)
}

/// Every file of the image.
fn fill(program: &Path, files: &Path) -> Result<()> {
    install(program, &files.join("usr/bin/orthodrome"), 0o755)?;
    for library in libraries(program)? {
        let place = library.strip_prefix("/").unwrap_or(&library);
        install(&library, &files.join(place), 0o755)?;
    }
    install(&root().join("LICENSE"), &files.join("usr/share/doc/orthodrome/copyright"), 0o644)?;
    let users = format!("root:x:0:0::/:/none\northodrome:x:{USER}:{USER}::/{DATA}:/none\n");
    write(&files.join("etc/passwd"), &users, 0o644)?;
    write(&files.join("etc/group"), &format!("root:x:0:\northodrome:x:{USER}:\n"), 0o644)?;
    tidy(files)
}

/// The libraries that a program loads, and the loader itself.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let text = output(Command::new("ldd").arg(program))?;
    let found: Vec<PathBuf> = text.lines().filter_map(library).collect();
    ensure!(found.len() >= 2, "ldd named no libraries of {}:\n{text}", program.display());
    Ok(found)
}

/// The path in a line of `ldd`: `libc.so.6 => /lib/libc.so.6 (0x…)`, or `/lib64/ld.so (0x…)`.
fn library(line: &str) -> Option<PathBuf> {
    let path = line.split_whitespace().find(|word| word.starts_with('/'))?;
    Some(PathBuf::from(path))
}

/// Makes an archive of `what` below `folder`, whose files belong to `owner`.
fn archive(folder: &Path, what: &str, owner: &str, time: &str, to: &Path) -> Result<()> {
    output(tar(owner, time).arg("--create").arg("--file").arg(to).arg("-C").arg(folder).arg(what))
        .map(drop)
}

/// Adds an empty directory to an archive, with its own owner and mode.
fn append(files: &Path, what: &str, (owner, mode): (&str, &str), to: (&str, &Path)) -> Result<()> {
    let folder = files.join(what);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let (time, archive) = to;
    let mut tar = tar(owner, time);
    tar.arg(format!("--mode={mode}")).arg("--append").arg("--file").arg(archive);
    output(tar.arg("-C").arg(files).arg(what)).map(drop)
}

/// `tar` with settings that make the result depend on the files alone.
fn tar(owner: &str, time: &str) -> Command {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--format=ustar", "--numeric-owner"]);
    tar.arg(format!("--owner={owner}")).arg(format!("--group={owner}"));
    tar.arg(format!("--mtime=@{time}"));
    tar
}

/// A content of the image, named by its digest.
struct Blob {
    digest: String,
    bytes: u64,
}

impl Blob {
    fn describe(&self, media: &str) -> Value {
        json!({
            "mediaType": media,
            "digest": format!("sha256:{}", self.digest),
            "size": self.bytes,
        })
    }
}

fn keep(file: &Path, blobs: &Path) -> Result<Blob> {
    let (digest, bytes) = (digest(file)?, fs::metadata(file)?.len());
    let to = blobs.join(&digest);
    fs::rename(file, &to).with_context(|| to.display().to_string())?;
    Ok(Blob { digest, bytes })
}

fn keep_json(value: &Value, stage: &Path, blobs: &Path) -> Result<Blob> {
    let file = stage.join("content.json");
    write(&file, &value.to_string(), 0o644)?;
    keep(&file, blobs)
}

/// The SHA-256 of a file, in hexadecimal digits.
fn digest(file: &Path) -> Result<String> {
    let text = output(Command::new("sha256sum").arg("--").arg(file))?;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod unit {
    use std::path::Path;

    use super::library;

    #[test]
    fn lines_of_ldd_name_libraries_and_the_loader() {
        let path = |line| library(line);
        let line = "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)";
        assert_eq!(path(line).as_deref(), Some(Path::new("/lib/x86_64-linux-gnu/libc.so.6")));
        let line = "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)";
        assert_eq!(path(line).as_deref(), Some(Path::new("/lib64/ld-linux-x86-64.so.2")));
        assert_eq!(path("\tlinux-vdso.so.1 (0x00007f)"), None);
    }
}
