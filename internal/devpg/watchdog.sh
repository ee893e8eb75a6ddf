# The watchdog of one devpg server: a process of its own session, run as the
# user that the server runs as. It owns the server and its directory from the
# first byte on disk to the last.
#
# Its standard input is a pipe whose only writer is the Go process, so any end
# of that process, kill -9 included, reads as end of file here. Then the server
# is stopped and the directory removed. Nothing else has to go right for that.
#
# Arguments: the directory of initdb and postgres; a library directory for them
# or ''; the lines for postgresql.conf; where a pristine data directory is, or is
# to be put for others, or ''; then the directories to try to create.
#
# Commands, one a line on standard input, and what each is answered with on
# standard output. One child runs at a time; when it ends, the line "exited
# STATUS" says so, and an answer "stopped" comes after that line.
#
#   (at the start)   dir PATH        or "refused WHY", and the watchdog ends
#   init             started PID     runs initdb, or copies the pristine directory
#   start PORT       started PID     runs postgres
#   stop fast|immediate   stopped    done when the child is gone; also if none runs
#
# POSIX sh, and nothing beyond mkdir, mkfifo, cp, mv, rm and sleep.

bin=$1 lib=$2 conf=$3 pristine=$4
shift 4

# Ignored here means ignored by the children that run before they set their own
# handlers; postgres and initdb do. Once the Go process is gone, an answer has
# no reader, and that must not end the watchdog.
trap '' PIPE
# What the Go process itself inherited from others, such as make, is not for a
# server to keep open.
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
exec 3>&1

dir=
why='no directory was given to try'
for try; do
	if why=$(mkdir -m 700 "$try" 2>&1); then
		dir=$try
		break
	fi
done
if [ -z "$dir" ]; then
	echo "refused $why"
	exit 1
fi
data=$dir/data
log=$dir/log
alive=$dir/alive # exists while a child runs; see spawn
fifo=$dir/fifo
pid=
keeper=
mkfifo -m 600 "$fifo"

# A unix socket's path has at most 103 bytes (104 with the final 0 on macOS, 108
# on Linux), and its name in this directory has 15.
sockets=$dir
[ ${#dir} -le 88 ] || sockets=

# spawn COMMAND ARG...: runs it in the background with nothing of ours open, so
# that no pipe of the Go process stays open because a server lives. A subshell,
# the keeper, waits for it, since only a parent may and this shell must go on
# reading its input. The keeper removes the file "alive" only after it has
# reaped the child: while that file exists, $pid is this child and no reused
# number. So the keeper before it must have done that, and ended.
spawn() {
	[ -z "$keeper" ] || wait "$keeper"
	echo >"$alive"
	{
		(
			if [ -n "$lib" ]; then
				export LD_LIBRARY_PATH="$lib" DYLD_LIBRARY_PATH="$lib"
			fi
			exec "$@"
		) </dev/null >>"$log" 2>&1 3>&- &
		echo $! >"$fifo"
		wait $!
		echo "exited $?" >&3
		rm -f "$alive"
	} 2>/dev/null &
	keeper=$!
	read -r pid <"$fifo"
	echo "started $pid"
}

# running: whether the child has yet to be reaped. Somebody may have removed the
# directory under a live server; then the number is all there is to go by.
running() {
	[ -e "$alive" ] || { [ ! -d "$dir" ] && kill -s 0 "$pid" 2>/dev/null; }
}

# gone SECONDS: waits until the child is gone, and fails if it still is there.
gone() {
	left=$(($1 * 50))
	while running; do
		[ "$left" -gt 0 ] || return 1
		left=$((left - 1))
		# Not every sleep takes fractions.
		sleep 0.02 2>/dev/null || { sleep 1 && left=$((left - 49)); }
	done
}

# halt MODE SECONDS: stops the child in that mode, and more harshly if it takes
# longer. The postmaster itself gives its children 5 seconds in an immediate
# stop.
halt() {
	if [ "$1" = fast ]; then
		signal INT
		gone "$2" && return
	fi
	signal QUIT
	gone 8 && return
	signal KILL
	gone 8
}

# signal NAME: SIGCONT follows, since somebody may have stopped the child.
signal() {
	if running; then
		kill -s "$1" "$pid"
		kill -s CONT "$pid"
	fi
} 2>/dev/null

# strays: kills what still works in the data directory, such as the children of
# a postmaster that was killed, and says whether there was any. Every process
# of a server has the data directory as its working directory. Where there is no
# /proc there is nothing to look through, and such children end by themselves.
strays() {
	found=1
	for p in /proc/[0-9]*; do
		# shellcheck disable=SC3013 # -ef: in dash, bash, busybox and ksh
		if [ "$p/cwd" -ef "$data" ]; then
			kill -s KILL "${p#/proc/}" && found=0
		fi
	done
	return $found
} 2>/dev/null

finish() {
	trap '' HUP INT TERM
	halt fast 4
	tries=0
	while strays && [ $tries -lt 250 ]; do
		tries=$((tries + 1))
		sleep 0.02
	done
	[ -z "$keeper" ] || wait "$keeper"
	# The lock file outlives only a server that was killed. Such a server also
	# leaves shared memory, which is not in the directory. The next server on the
	# same data would take it over, so one is started that does no more than
	# that: --check, called --boot -x0 before PostgreSQL 15.
	if [ -e "$data/postmaster.pid" ]; then
		spawn "$bin/postgres" --check -D "$data" >/dev/null
		gone 8 || halt immediate 0
		if [ -e "$data/postmaster.pid" ]; then
			spawn "$bin/postgres" --boot -x0 -D "$data" >/dev/null
			gone 8 || halt immediate 0
		fi
	fi
	rm -rf "$dir" || { sleep 1 && rm -rf "$dir"; }
	exit 0
} >/dev/null 2>&1
trap finish HUP INT TERM

# init: whoever owns the pristine directory may remove it at any moment.
init() {
	set -- "$bin/initdb" -D "$data" -U postgres -A trust --encoding=UTF8 --locale=C --no-sync
	if [ -d "$pristine" ]; then
		# shellcheck disable=SC2016 # for that shell
		set -- sh -c 'cp -Rp "$1" "$2" 2>/dev/null && exit; rm -rf "$2"; shift 2; exec "$@"' sh "$pristine" "$data" "$@"
	fi
	spawn "$@"
}

# preserve: the first of several does it.
preserve() {
	[ -n "$pristine" ] && [ ! -e "$pristine" ] && mkdir "$pristine.making" &&
		cp -Rp "$data" "$pristine.making/data" && mv "$pristine.making/data" "$pristine"
} 2>/dev/null

echo "dir $dir"
configured=
while read -r verb arg; do
	case $verb in
	init)
		init
		;;
	start)
		if [ -z "$configured" ]; then
			preserve
			printf '%s\n' "$conf" >>"$data/postgresql.conf"
			configured=yes
		fi
		spawn "$bin/postgres" -D "$data" -p "$arg" -k "$sockets"
		;;
	stop)
		halt "$arg" 60
		echo stopped
		;;
	esac
done
finish
