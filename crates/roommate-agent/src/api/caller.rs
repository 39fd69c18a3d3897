//! Who asks: the user behind a request, and how much of that user's rights the request carries.
//!
//! ```text
//!  socket ── SO_PEERCRED ──▶ uid ─┐
//!                                 ├─ Mode ─▶ Caller { user, admin, scope }
//!  HTTP ──── token ─▶ uid, scope ─┘
//! ```
//!
//! - The verb of a request is checked here, before anything is done ([`Caller::refusal`]).
//! - The job of a request is checked by the daemon: to a user, jobs of others do not exist
//!   ([`Caller::sees`]).

use crate::AgentError;
use crate::api::control::{Reply, Request};
use crate::paths::Access;
use crate::process::supervisor::RunAs;
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::OnceLock;

/// The administrator of every machine.
const ROOT: u32 = 0;
/// The group that owns nothing.
const NO_GROUP: u32 = 65_534;

/// A user of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// Its number, by which rights are decided.
    pub uid: u32,
    /// Its name, for people; the number where the machine has no name for it.
    pub name: String,
}

impl User {
    /// The user as whom this program runs.
    pub fn this() -> Self {
        static THIS: OnceLock<User> = OnceLock::new();
        THIS.get_or_init(|| Self::of(rustix::process::geteuid().as_raw())).clone()
    }

    /// The user of this number.
    pub fn of(uid: u32) -> Self {
        let name = account(&passwd(), |_, number| number == uid).map(|(name, _)| name);
        Self { uid, name: name.unwrap_or_else(|| uid.to_string()) }
    }

    /// The user of this name, or of this number.
    pub fn named(text: &str) -> Option<Self> {
        match text.parse() {
            Ok(uid) => Some(Self::of(uid)),
            Err(_) => {
                account(&passwd(), |name, _| name == text).map(|(name, uid)| Self { uid, name })
            }
        }
    }

    /// Whether the user belongs to the group of this number, as its main group or as one of its
    /// members.
    fn is_in(&self, gid: u32) -> bool {
        let group = fs::read_to_string("/etc/group").unwrap_or_default();
        is_member(&passwd(), &group, &self.name, gid)
    }
}

/// The number of the group with this name or number.
pub fn group_id(text: &str) -> Option<u32> {
    let group = fs::read_to_string("/etc/group").unwrap_or_default();
    // The first three fields are those of a password file.
    text.parse().ok().or_else(|| account(&group, |name, _| name == text).map(|(_, gid)| gid))
}

fn passwd() -> String {
    fs::read_to_string("/etc/passwd").unwrap_or_default()
}

/// The first account in the text of a password file that is meant: its name and its number.
fn account(passwd: &str, is_meant: impl Fn(&str, u32) -> bool) -> Option<(String, u32)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, uid) = (fields.next()?, fields.nth(1)?.parse().ok()?);
        is_meant(name, uid).then(|| (name.to_string(), uid))
    })
}

/// A user's groups, according to the texts of both files.
fn membership(passwd: &str, group: &str, uid: u32) -> Option<RunAs> {
    let (name, _) = account(passwd, |_, number| number == uid)?;
    let fields = passwd.lines().map(|l| l.split(':').collect::<Vec<&str>>());
    let own =
        fields.filter(|f| f.first() == Some(&name.as_str())).find_map(|f| f.get(3)?.parse().ok());
    let gid: u32 = own?;
    let listed = group.lines().filter_map(|l| {
        let fields: Vec<&str> = l.split(':').collect();
        let is_member = fields.get(3)?.split(',').any(|m| m.trim() == name);
        fields.get(2)?.parse().ok().filter(|_| is_member)
    });
    let mut groups: Vec<u32> = std::iter::once(gid).chain(listed).collect();
    groups.dedup();
    Some(RunAs { uid, gid, groups })
}

/// Whether a user is in a group, according to the texts of both files.
fn is_member(passwd: &str, group: &str, name: &str, gid: u32) -> bool {
    let gid = gid.to_string();
    let own = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        fields.first() == Some(&name) && fields.get(3) == Some(&gid.as_str())
    };
    let listed = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        let members = fields.get(3).copied().unwrap_or_default();
        fields.get(2) == Some(&gid.as_str())
            && members.split(',').any(|m| !m.is_empty() && m == name)
    };
    passwd.lines().any(own) || group.lines().any(listed)
}

/// Whom a daemon serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The user as whom it runs, and root. Both may do everything.
    #[default]
    User,
    /// The users of this machine, each with own jobs.
    System {
        /// The group whose members may use the socket; `None` = every user of the machine.
        group: Option<u32>,
        /// The group whose members are administrators; root always is one.
        admins: Option<u32>,
    },
}

impl Mode {
    /// Whether users are kept apart.
    pub fn is_system(self) -> bool {
        self != Self::User
    }

    /// Refuses what the user of this process cannot offer to others.
    pub(crate) fn check(self) -> Result<(), AgentError> {
        if self.is_system() && User::this().uid != ROOT {
            let what = "only root can run jobs as other users";
            return Err(AgentError::refused(what, "start as root, or without --system"));
        }
        Ok(())
    }

    /// The user as whom jobs of this owner run; `None` = that of the daemon. An owner without an
    /// account on this machine has no groups.
    pub(crate) fn run_as(self, owner: &User) -> Option<RunAs> {
        let group = || fs::read_to_string("/etc/group").unwrap_or_default();
        let none = RunAs { uid: owner.uid, gid: NO_GROUP, groups: Vec::new() };
        self.is_system().then(|| membership(&passwd(), &group(), owner.uid).unwrap_or(none))
    }

    /// Who may connect to the socket for users.
    pub(crate) fn access(self) -> Access {
        match self {
            Self::User => Access::Owner,
            Self::System { group: Some(group), .. } => Access::Group(group),
            Self::System { group: None, .. } => Access::Everyone,
        }
    }

    /// A user with all own rights; `None` if this daemon does not serve that user.
    pub(crate) fn caller(self, user: User) -> Option<Caller> {
        let admin = match self {
            Self::User if user.uid == ROOT || user.uid == User::this().uid => true,
            Self::User => return None,
            Self::System { admins, .. } => {
                user.uid == ROOT || admins.is_some_and(|gid| user.is_in(gid))
            }
        };
        Some(Caller { user, admin, scope: Scope::Admin })
    }

    /// The owner of what this caller creates: in a daemon of one user, that user.
    pub(crate) fn owner(self, caller: &Caller) -> User {
        if self.is_system() { caller.user.clone() } else { User::this() }
    }
}

/// How much of a user's rights a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// See jobs and their output.
    Read,
    /// Also submit and change jobs.
    Operate,
    /// Everything that the user may do.
    Admin,
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        })
    }
}

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub user: User,
    /// Whether the jobs of all users are the caller's business.
    pub admin: bool,
    /// How much of the user's rights the request carries.
    pub scope: Scope,
}

impl Caller {
    /// This program itself.
    pub fn this() -> Self {
        Self { user: User::this(), admin: true, scope: Scope::Admin }
    }

    /// The same user with fewer rights.
    pub(crate) fn with(self, scope: Scope) -> Self {
        Self { admin: self.admin && scope == Scope::Admin, scope, ..self }
    }

    /// Whether a job of this owner exists for the caller.
    pub(crate) fn sees(&self, owner: &User) -> bool {
        self.admin || self.user.uid == owner.uid
    }

    /// The answer to a request that the caller may not make, whatever the job.
    pub(crate) fn refusal(&self, request: &Request, mode: Mode) -> Option<Reply> {
        let (needs, only_admins) = match request {
            // Others are in it, so it is for those who may read the journal.
            Request::WhatIf(_) => {
                (Scope::Read, mode.is_system().then_some("try a job on the machine of all"))
            }
            Request::Ps {}
            | Request::Describe { .. }
            | Request::Logs { .. }
            | Request::History { .. }
            | Request::Machine {} => (Scope::Read, None),
            // It names the jobs of all users.
            Request::Journal { .. } => {
                (Scope::Read, mode.is_system().then_some("read the journal"))
            }
            Request::Submit(_)
            | Request::Draft(_)
            | Request::Cancel { .. }
            | Request::Suspend { .. }
            | Request::Resume { .. }
            | Request::Resize { .. } => (Scope::Operate, None),
            Request::Down { .. } => (Scope::Admin, Some("end the daemon")),
            Request::TokenCreate(_) | Request::TokenList {} | Request::TokenRevoke { .. } => {
                (Scope::Admin, None)
            }
        };
        if self.scope < needs {
            let what = format!("this token has the scope `{}`, not `{needs}`", self.scope);
            let hint = format!("`roommate token create --scope {needs}` on that machine makes one");
            return Some(Reply::error(what, &hint));
        }
        let what = only_admins.filter(|_| !self.admin)?;
        let hint = "ask root, or a member of the daemon's group of administrators";
        Some(Reply::error(format!("only an administrator may {what}"), hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken line\n\
                          alice:x:1001:1001::/home/alice:/bin/sh\nbob:x:1002:50::/home/bob:/bin/sh";
    const GROUP: &str = "root:x:0:\nstaff:x:50:alice,carol\nalice:x:1001:\nempty:x:60:";

    #[test]
    fn accounts_are_found_by_name_and_number() {
        let found = |uid| account(PASSWD, |_, number| number == uid).map(|(name, _)| name);
        assert_eq!(found(1001), Some("alice".into()));
        assert_eq!(found(7), None);
        assert_eq!(account(PASSWD, |name, _| name == "bob"), Some(("bob".into(), 1002)));
        assert_eq!(User::of(4_000_000_000).name, "4000000000");
    }

    #[test]
    fn members_are_listed_or_have_the_group_as_their_own() {
        for (name, gid, expect) in
            [("alice", 50, true), ("bob", 50, true), ("alice", 1001, true), ("bob", 60, false)]
        {
            assert_eq!(is_member(PASSWD, GROUP, name, gid), expect, "{name} {gid}");
        }
        assert!(!is_member(PASSWD, GROUP, "", 60), "nobody is in an empty group");
    }

    fn user(uid: u32) -> User {
        User { uid, name: format!("u{uid}") }
    }

    #[test]
    fn a_daemon_of_one_user_serves_that_user_and_root() {
        let mine = User::this();
        let caller = Mode::User.caller(mine.clone()).unwrap();
        assert!(caller.admin && Mode::User.owner(&caller) == mine);
        let root = Mode::User.caller(user(0)).unwrap();
        assert!(root.admin && Mode::User.owner(&root) == mine);
        assert_eq!(Mode::User.caller(user(4_000_000_000)), None);
    }

    #[test]
    fn users_of_a_machine_see_only_what_is_theirs() {
        let mode = Mode::System { group: None, admins: None };
        let (root, a) = (mode.caller(user(0)).unwrap(), mode.caller(user(4_000_000_000)).unwrap());
        assert!(root.sees(&user(7)) && a.sees(&user(4_000_000_000)) && !a.sees(&user(7)));
        let refused = |caller: &Caller, request: Request| {
            caller.refusal(&request, mode).map(|reply| match reply {
                Reply::Error { what, .. } => what,
                other => format!("{other:?}"),
            })
        };
        let journal = || Request::Journal { from: crate::process::rotated_file::Place::default() };
        let down = || Request::Down { stop_jobs: true };
        assert_eq!(refused(&root, journal()), None);
        assert_eq!(refused(&a, journal()).unwrap(), "only an administrator may read the journal");
        assert_eq!(refused(&a, down()).unwrap(), "only an administrator may end the daemon");
        assert_eq!(refused(&a, Request::TokenList {}), None);
        let reader = root.clone().with(Scope::Read);
        assert!(!reader.admin && !reader.sees(&user(7)));
        let cancel = Request::Cancel { job: "x".into() };
        assert_eq!(
            refused(&reader, cancel).unwrap(),
            "this token has the scope `read`, not `operate`"
        );
        assert_eq!(refused(&reader, Request::Ps {}), None);
        assert!(refused(&root.with(Scope::Operate), Request::TokenList {}).is_some());
    }
}
