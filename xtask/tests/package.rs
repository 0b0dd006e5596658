//! The package for Debian, installed into a directory of its own, and the container image.

#![allow(clippy::unwrap_used, clippy::disallowed_types, clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The program of the workspace, which cargo builds beside `xtask`.
fn program() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("orthodrome");
    assert!(program.exists(), "{}: build it with cargo build --workspace", program.display());
    program
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

/// A directory that is removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_here(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Reports why a test is skipped, as `cargo xtask test` expects it.
fn skipped(why: &str) {
    use std::io::Write as _;
    eprintln!("SKIPPED: {why}");
    let Some(list) = std::env::var_os("ORTHODROME_SKIPPED") else { return };
    let mut list = fs::File::options().append(true).create(true).open(list).unwrap();
    let thread = std::thread::current();
    writeln!(list, "{}: {why}", thread.name().unwrap_or("a test")).unwrap();
}

/// Installs the package into `root` with dpkg and its scripts, as far as no running system is
/// needed.
fn install(package: &Path, root: &Path) {
    fs::create_dir_all(root.join("var/lib/dpkg/updates")).unwrap();
    fs::create_dir_all(root.join("var/lib/dpkg/info")).unwrap();
    fs::create_dir(root.join("etc")).unwrap();
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available"] {
        fs::write(root.join(file), "").unwrap();
    }
    let mut dpkg = Command::new("dpkg");
    dpkg.arg(format!("--root={}", root.display()));
    // The root has no other packages, and nothing that a script could change to it with.
    dpkg.args(["--force-depends", "--force-script-chrootless", "--force-not-root", "--install"]);
    run(dpkg.arg(package));
}

#[test]
fn the_package_installs_the_program_its_pages_and_units_that_systemd_accepts() {
    if !is_here("dpkg-deb") {
        return skipped("dpkg-deb is not installed (Debian's package dpkg)");
    }
    let folder = Folder::new("package");
    let out = folder.0.join("out");
    let build = || {
        let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
        let made = run(xtask.arg("package").arg("--out").arg(&out).arg("--program").arg(program()));
        let package = PathBuf::from(text(made).trim());
        (fs::read(&package).unwrap(), package)
    };
    let (bytes, package) = build();
    assert!(bytes == build().0, "one commit gives two packages");

    let field =
        |name: &str| text(run(Command::new("dpkg-deb").arg("--field").arg(&package).arg(name)));
    assert_eq!(field("Version").trim(), env!("CARGO_PKG_VERSION"));
    assert!(!field("Depends").contains('@'), "{}", field("Depends"));
    let contents = text(run(Command::new("dpkg-deb").arg("--contents").arg(&package)));
    for line in contents.lines() {
        assert!(line.contains(" root/root "), "{line}");
        assert!(line.starts_with("drwxr-xr-x") || line.starts_with("-rw"), "{line}");
    }

    let root = folder.0.join("root");
    install(&package, &root);
    let installed = root.join("usr/bin/orthodrome");
    let version = text(run(Command::new(&installed).arg("--version")));
    assert!(version.starts_with(&format!("orthodrome {}", env!("CARGO_PKG_VERSION"))), "{version}");
    // The scripts have made the user and the directories.
    let users = fs::read_to_string(root.join("etc/passwd")).unwrap();
    assert!(users.lines().any(|line| line.starts_with("orthodrome:")), "{users}");
    for place in ["etc/orthodrome", "var/lib/orthodrome"] {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(root.join(place)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o750, "{place}");
    }

    // Every command has a page, and the units name pages that exist.
    let pages: BTreeSet<String> = fs::read_dir(root.join("usr/share/man/man1"))
        .unwrap()
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    let help = text(run(Command::new(&installed).arg("--help")));
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let names = commands.lines().take_while(|line| line.starts_with("  "));
    let names: Vec<&str> = names
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(names.len() > 10, "only {names:?} found: is the search broken?");
    for name in names {
        assert!(
            pages.contains(&format!("orthodrome-{name}.1.gz")),
            "{name} has no page: {pages:?}"
        );
    }
    for shell in ["bash-completion/completions/orthodrome", "zsh/vendor-completions/_orthodrome"] {
        let script = fs::read_to_string(root.join("usr/share").join(shell)).unwrap();
        assert!(script.contains("--new-cluster"), "{shell}");
    }
    let units = root.join("usr/lib/systemd/system");
    let mut verified = Vec::new();
    for unit in fs::read_dir(&units).unwrap() {
        let name = unit.unwrap().file_name().into_string().unwrap();
        let content = fs::read_to_string(units.join(&name)).unwrap();
        for page in content.lines().filter_map(|line| line.strip_prefix("Documentation=man:")) {
            let page = page.trim_end_matches("(1)");
            assert!(pages.contains(&format!("{page}.1.gz")), "{name} names the page {page}");
        }
        // The command of the unit, for a file that does not exist: the option is known.
        let line =
            content.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/orthodrome "));
        let arguments = line.unwrap().replace("%i", "none");
        let refused = Command::new(&installed).args(arguments.split(' ')).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{name}: {said}");
        assert!(said.contains("/etc/orthodrome/none.toml"), "{name}: {said}");
        verified.push(name);
    }
    assert_eq!(verified.len(), 3, "{verified:?}");
    verify(&root, &verified);
}

/// Lets systemd check the units, if it is installed.
fn verify(root: &Path, units: &[String]) {
    if !is_here("systemd-analyze") {
        return skipped("systemd-analyze is not installed (Debian's package systemd)");
    }
    for unit in units {
        // systemd looks for the program and for the targets in the same root.
        let instance = unit.replace("@.", "@n1.");
        let mut analyze = Command::new("systemd-analyze");
        let output = analyze
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(format!("--root={}", root.display()))
            .arg(&instance)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{instance}: {said}");
        for word in ["Unknown", "Failed to parse", "not executable", "ignoring"] {
            assert!(!said.contains(word), "{instance}: {said}");
        }
    }
}

/// Commands that change the root directory, with their first arguments.
const CHANGE_ROOT: [(&str, &[&str]); 2] =
    [("chroot", &[]), ("unshare", &["--map-root-user", "chroot"])];

#[test]
fn the_image_has_what_its_digests_say_and_its_program_runs_with_nothing_else() {
    let folder = Folder::new("image");
    let out = folder.0.join("out");
    let build = || {
        let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
        let made = run(xtask.arg("image").arg("--out").arg(&out).arg("--program").arg(program()));
        let image = PathBuf::from(text(made).trim());
        (fs::read(&image).unwrap(), image)
    };
    let (bytes, image) = build();
    assert!(bytes == build().0, "one commit gives two images");

    let layout = folder.0.join("layout");
    fs::create_dir(&layout).unwrap();
    run(Command::new("tar").arg("-xf").arg(&image).arg("-C").arg(&layout));
    let blobs = layout.join("blobs/sha256");
    for blob in fs::read_dir(&blobs).unwrap() {
        let blob = blob.unwrap();
        let digest = text(run(Command::new("sha256sum").arg(blob.path())));
        assert!(digest.starts_with(blob.file_name().to_str().unwrap()), "{digest}");
    }
    let read = |file: &Path| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
    };
    let named = |described: &serde_json::Value| {
        let digest = described["digest"].as_str().unwrap();
        let file = blobs.join(digest.strip_prefix("sha256:").unwrap());
        assert_eq!(fs::metadata(&file).unwrap().len(), described["size"], "{digest}");
        file
    };
    let manifest = read(&named(&read(&layout.join("index.json"))["manifests"][0]));
    let config = read(&named(&manifest["config"]));
    assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/orthodrome");
    let layer = named(&manifest["layers"][0]);
    let unpacked =
        text(run(Command::new("sh").args(["-c", "gzip -dc \"$0\" | sha256sum"]).arg(&layer)));
    let content = config["rootfs"]["diff_ids"][0].as_str().unwrap();
    assert!(content.ends_with(unpacked.split_whitespace().next().unwrap()), "{unpacked}");

    let root = folder.0.join("root");
    fs::create_dir(&root).unwrap();
    run(Command::new("tar").arg("-xzf").arg(&layer).arg("-C").arg(&root));
    let may = |(program, first): &(&str, &[&str])| {
        let tried = Command::new(program).args(*first).args(["/", "true"]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let Some((changer, first)) = CHANGE_ROOT.into_iter().find(may) else {
        return skipped("this user may not change the root directory (chroot, unshare)");
    };
    // With its own libraries only.
    let contained = |args: &[&str]| {
        let mut command = Command::new(changer);
        command.args(first).arg(&root).arg("/usr/bin/orthodrome");
        text(run(command.args(args)))
    };
    let version = contained(&["--version"]);
    assert!(version.starts_with(&format!("orthodrome {}", env!("CARGO_PKG_VERSION"))), "{version}");
    contained(&["serve", "--init", "/tmp/nodes", "--topology", "local3"]);
    assert!(root.join("tmp/nodes/n1.toml").exists());
}
