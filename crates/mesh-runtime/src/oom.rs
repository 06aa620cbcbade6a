//! Whether the kernel has killed a process for lack of memory: its signal is SIGKILL, as anybody's, but the kernel counts
//! the processes of each memory cgroup that it has killed so, and those of the whole machine.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The kernel's count for the cgroup of this process, in which its children are too unless somebody moves them.
#[derive(Debug)]
pub(crate) struct OomKills {
    file: PathBuf,
    known: u64,
    /// Kills that belong to no death yet that this process has heard of.
    unclaimed: u64,
}

impl OomKills {
    /// Counts from now on; none if this kernel does not tell.
    pub(crate) fn from_now_on() -> Option<Self> {
        Self::below(Path::new("/"))
    }

    fn below(root: &Path) -> Option<Self> {
        let groups = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let file = candidates(root, &groups).into_iter().find(|file| count(file).is_some())?;
        let known = count(&file)?;
        Some(Self { file, known, unclaimed: 0 })
    }

    /// Somebody has died of SIGKILL: whether the kernel has killed one more than those that were asked for before.
    pub(crate) fn claim(&mut self) -> bool {
        if let Some(now) = count(&self.file) {
            self.unclaimed += now.saturating_sub(self.known);
            self.known = now;
        }
        let is_one = self.unclaimed > 0;
        self.unclaimed -= u64::from(is_one);
        is_one
    }
}

/// Where the count may be, the nearest first: version 2 of cgroups, version 1, the machine.
fn candidates(root: &Path, groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mounts, name): (&[&str], _) = if controllers.is_empty() {
            (&["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.events")
        } else if controllers.split(',').any(|one| one == "memory") {
            (&["sys/fs/cgroup/memory"], "memory.oom_control")
        } else {
            continue;
        };
        for mount in mounts {
            // In a container the path may be that on the host, and the mount the container's part of it.
            for path in [path.trim_start_matches('/'), ""] {
                files.push(root.join(mount).join(path).join(name));
            }
        }
    }
    files.push(root.join("proc/vmstat"));
    files
}

fn count(file: &Path) -> Option<u64> {
    let text = read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|number| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use std::fs::{create_dir_all, write};

    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str, cgroup: &str) -> Self {
            let machine = Self(std::env::temp_dir().join(format!("mesh-oom-{name}-{}", std::process::id())));
            machine.put("proc/self/cgroup", cgroup);
            machine
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, text).unwrap();
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn kills_of_the_own_cgroup_count_from_the_beginning_and_each_once() {
        let machine = Machine::new("v2", "0::/job.slice/mesh\n");
        let events = "sys/fs/cgroup/job.slice/mesh/memory.events";
        machine.put("proc/vmstat", "oom_kill 77\n");
        machine.put(events, "low 0\noom 5\noom_kill 3\noom_group_kill 9\n");
        let mut kills = OomKills::below(&machine.0).unwrap();
        assert!(!kills.claim());
        machine.put(events, "low 0\noom 7\noom_kill 5\noom_group_kill 9\n");
        assert!(kills.claim() && kills.claim() && !kills.claim());
        std::fs::remove_file(machine.0.join(events)).unwrap();
        assert!(!kills.claim());
    }

    #[test]
    fn where_the_count_is() {
        let v1 = Machine::new("v1", "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/\n");
        v1.put("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
        v1.put("proc/vmstat", "nr 1\noom_kill 8\n");
        assert_eq!(OomKills::below(&v1.0).unwrap().known, 2);
        let whole = Machine::new("whole", "0::/\n");
        whole.put("proc/vmstat", "nr 1\noom_kill 8\n");
        assert_eq!(OomKills::below(&whole.0).unwrap().known, 8);
        assert!(OomKills::below(&Machine::new("none", "nonsense").0).is_none());
    }
}
