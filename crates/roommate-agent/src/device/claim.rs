//! Claims: one daemon per machine uses a device.
//!
//! A claim is a lock (`flock`) on a file with the device's name, which the kernel releases when the
//! daemon ends. The files lie where every user of the machine can create files and nobody can
//! remove or replace another's: a folder of root with the sticky bit. They have no content: the
//! kernel knows who holds a lock (`/proc/locks`), and that cannot be forged.
//!
//! GPUs are always claimed alone. Cores are shared by default: a daemon only says that another one
//! uses them too, unless one of them claims them alone.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A claim of a device, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
}

/// Whether a device is claimed alone or shared with others who share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Alone,
    Shared,
}

/// A process that holds a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
    pub(crate) user: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}", self.pid, self.user)
    }
}

/// Why a device cannot be claimed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another daemon claimed it; the kernel may hide which.
    Taken(Option<Holder>),
    /// The file cannot be used.
    Unusable(String),
}

impl Refusal {
    /// Whether root or this user has the device. What another user claims keeps nobody from the
    /// cores: anybody could.
    fn is_by_right(&self) -> bool {
        let own = user_of(std::process::id());
        matches!(self, Self::Taken(Some(holder)) if holder.user == "root" || holder.user == own)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(Some(holder)) => write!(f, "claimed by {holder}"),
            Self::Taken(None) => write!(f, "claimed by another process"),
            Self::Unusable(why) => write!(f, "cannot be claimed: {why}"),
        }
    }
}

/// Selects another folder for the files, for tests.
const FOLDER_VARIABLE: &str = "ROOMMATE_CLAIMS";
/// The first of these that anybody may create files in is used; so all users find the same one.
const FOLDERS: [&str; 3] = ["/run/lock", "/var/lock", "/dev/shm"];
/// A supervisor that a killed daemon was spawning shares that daemon's locks until it has executed
/// its program; such a lock is waited for.
const TRIES: u32 = 50;
const BETWEEN: Duration = Duration::from_millis(20);

/// The folder of the claims of this machine.
pub(crate) fn folder() -> PathBuf {
    if let Some(chosen) = std::env::var_os(FOLDER_VARIABLE).filter(|v| !v.is_empty()) {
        return chosen.into();
    }
    let open = |p: &Path| p.metadata().is_ok_and(|m| m.is_dir() && is_open(m.uid(), m.mode()));
    FOLDERS.iter().find(|f| open(Path::new(f))).map_or_else(std::env::temp_dir, PathBuf::from)
}

/// Whether anybody may create files in a folder, but remove only their own.
fn is_open(uid: u32, mode: u32) -> bool {
    uid == 0 && mode & 0o1777 == 0o1777
}

impl Claim {
    /// Claims a device by its name, which is unique on this machine.
    pub(crate) fn take(folder: &Path, device: &str, way: Way) -> Result<Self, Refusal> {
        let path = folder.join(format!("roommate-{device}.lock"));
        let file = open(&path)?;
        let operation = match way {
            Way::Alone => FlockOperation::NonBlockingLockExclusive,
            Way::Shared => FlockOperation::NonBlockingLockShared,
        };
        for attempt in 1.. {
            match flock(&file, operation) {
                Ok(()) => return Ok(Self { file }),
                Err(Errno::WOULDBLOCK) if attempt < TRIES => std::thread::sleep(BETWEEN),
                Err(Errno::WOULDBLOCK) => break,
                Err(e) => return Err(unusable(&path, e)),
            }
        }
        Err(Refusal::Taken(holders(&file).into_iter().next()))
    }

    /// Other processes that hold a claim of the device.
    pub(crate) fn others(&self) -> Vec<Holder> {
        let this = std::process::id();
        holders(&self.file).into_iter().filter(|h| h.pid != this).collect()
    }
}

/// Claims cores, alone or beside other daemons that share them. Returns what is to be said of
/// those.
pub(crate) fn cores(
    folder: &Path,
    cores: &[u32],
    alone: bool,
) -> Result<(Vec<Claim>, BTreeSet<String>), String> {
    let way = if alone { Way::Alone } else { Way::Shared };
    let (mut claims, mut beside) = (Vec::new(), BTreeSet::new());
    for core in cores {
        match Claim::take(folder, &format!("core-{core}"), way) {
            Ok(claim) => {
                let others = claim.others();
                beside.extend(others.iter().map(|o| format!("the cores are also used by {o}")));
                claims.push(claim);
            }
            Err(why) if alone => {
                return Err(format!(
                    "core {core} is {why}: end that daemon, submit jobs to it, or share the cores \
                     (without --claim)"
                ));
            }
            Err(why) if why.is_by_right() => {
                return Err(format!("core {core} is {why}: submit jobs to that daemon"));
            }
            Err(why) => {
                beside.insert(format!("the cores are {why}"));
            }
        }
    }
    Ok((claims, beside))
}

/// Opens the file of a device, or creates it. Anybody may lock it; to lock is all that is done.
fn open(path: &Path) -> Result<File, Refusal> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = |e: Errno| unusable(path, e);
    // Not `CREATE` alone: the kernel refuses that for files of others in such a folder.
    let opened = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, Mode::from(0o644)) {
                // Another daemon was faster.
                Err(Errno::EXIST) => rustix::fs::open(path, flags, Mode::empty()),
                created => created,
            }
        }
        opened => opened,
    };
    let file = File::from(opened.map_err(failed)?);
    let found = file.metadata().map_err(|e| unusable(path, e))?;
    if !found.is_file() {
        return Err(Refusal::Unusable(format!("{:?} is not a file", path.display().to_string())));
    }
    if found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o444 != 0o444 {
        // A strict umask would lock out other users' daemons.
        let _ = file.set_permissions(fs::Permissions::from_mode(0o644));
    }
    Ok(file)
}

fn unusable(path: &Path, e: impl fmt::Display) -> Refusal {
    Refusal::Unusable(format!("could not lock {:?}: {e}", path.display().to_string()))
}

/// The processes that hold a lock on the file, as the kernel tells.
fn holders(file: &File) -> Vec<Holder> {
    let Ok(found) = file.metadata() else { return Vec::new() };
    let (major, minor) = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
    let mark = format!("{major:02x}:{minor:02x}:{}", found.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let held = locks.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|w| *w != "FLOCK").skip(3);
        let pid = words.next()?.parse().ok()?;
        (words.next()? == mark).then_some(pid)
    });
    held.map(|pid| Holder { pid, user: user_of(pid) }).collect()
}

/// The user of a process, by name where it has one.
pub(crate) fn user_of(pid: u32) -> String {
    let Ok(found) = fs::metadata(format!("/proc/{pid}")) else { return "an unknown user".into() };
    let uid = found.uid();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_string())
    });
    name.unwrap_or_else(|| format!("user {uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_claimed_alone_until_the_claim_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let take = |device, way| Claim::take(folder.path(), device, way);
        let first = take("gpu-a", Way::Alone).unwrap();
        let refused = take("gpu-a", Way::Alone).unwrap_err();
        let this = std::process::id();
        let user = user_of(this);
        assert_eq!(refused, Refusal::Taken(Some(Holder { pid: this, user: user.clone() })));
        assert_eq!(refused.to_string(), format!("claimed by process {this} of {user}"));
        assert!(matches!(take("gpu-a", Way::Shared), Err(Refusal::Taken(_))));
        let _other = take("gpu-b", Way::Alone).unwrap();
        drop(first);
        take("gpu-a", Way::Alone).unwrap();
    }

    #[test]
    fn shared_devices_know_their_other_users() {
        let folder = tempfile::tempdir().unwrap();
        let take = |way| Claim::take(folder.path(), "core-0", way);
        let first = take(Way::Shared).unwrap();
        assert_eq!(first.others(), []);
        // Another process with a lock of its own.
        let mut child = std::process::Command::new("flock")
            .arg("--shared")
            .arg(folder.path().join("roommate-core-0.lock"))
            .args(["sleep", "60"])
            .spawn()
            .unwrap();
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while first.others().iter().all(|h| h.pid != child.id()) {
            assert!(std::time::Instant::now() < end, "the other user is not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(first);
        assert!(matches!(take(Way::Alone), Err(Refusal::Taken(Some(_)))));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn cores_are_shared_unless_one_daemon_claims_them() {
        let folder = tempfile::tempdir().unwrap();
        let first = cores(folder.path(), &[0, 1], false).unwrap();
        assert!(first.1.is_empty(), "{:?}", first.1);
        let second = cores(folder.path(), &[1], false).unwrap();
        let error = cores(folder.path(), &[1], true).unwrap_err();
        assert!(error.starts_with("core 1 is claimed by process "), "{error}");
        drop((first, second));
        let _alone = cores(folder.path(), &[0, 1], true).unwrap();
        let error = cores(folder.path(), &[0], false).unwrap_err();
        assert!(error.starts_with("core 0 is claimed by process "), "{error}");
        let of_another = Holder { pid: 1, user: "mallory".into() };
        assert!(!Refusal::Taken(Some(of_another)).is_by_right());
    }

    #[test]
    fn a_link_in_the_place_of_a_claim_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, at) = (folder.path().join("x"), folder.path().join("roommate-gpu-a.lock"));
        fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &at).unwrap();
        let refused = Claim::take(folder.path(), "gpu-a", Way::Alone).unwrap_err();
        assert!(matches!(refused, Refusal::Unusable(_)), "{refused}");
        fs::remove_file(&at).unwrap();
        fs::create_dir(&at).unwrap();
        let refused = Claim::take(folder.path(), "gpu-a", Way::Alone).unwrap_err();
        assert!(refused.to_string().ends_with("is not a file"), "{refused}");
    }

    #[test]
    fn only_sticky_folders_of_root_are_open_to_all() {
        assert!(is_open(0, 0o041_777));
        assert!(!is_open(0, 0o040_777), "anybody could remove a claim");
        assert!(!is_open(1000, 0o041_777), "its owner could remove a claim");
        assert!(!is_open(0, 0o040_755));
    }
}
